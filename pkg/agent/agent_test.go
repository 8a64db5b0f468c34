package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// Links, listeners, diversion; and the reverse.
func TestStartAndStopOrder(t *testing.T) {
	r := newRig(t)
	var (
		mu    sync.Mutex
		story []string
		last  rules.State
	)
	tell := func(what string, ok bool) {
		mu.Lock()
		defer mu.Unlock()
		if !ok {
			what = "NOT " + what
		}
		story = append(story, what)
	}
	r.mode.onApply = func(_ context.Context, s rules.State) error {
		last = s
		eventually(t, "links", func() bool { r.links.mu.Lock(); defer r.links.mu.Unlock(); return r.links.running })
		tell("listening when diverted", listens(s) == nil)
		return nil
	}
	r.mode.onClose = func() {
		tell("listening when no longer diverted", listens(last) == nil)
	}
	r.links.atEnd = func() {
		tell("no longer diverting when links end", r.mode.Closed() == 1)
		_, err := net.Dial("tcp", "127.0.0.1:"+strconv.Itoa(int(last.Diverts[0].Ports.Host4)))
		tell("no longer listening when links end", errors.Is(err, syscall.ECONNREFUSED))
	}
	r.diverting()
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	want := "listening when diverted, listening when no longer diverted, no longer diverting when links end, no longer listening when links end"
	if got := strings.Join(story, ", "); got != want {
		t.Errorf("the story is\n%s, want\n%s", got, want)
	}
	if r.logged(logrus.InfoLevel, "diverting") == 0 || r.logged(logrus.InfoLevel, "connects are refused until an agent runs again") != 1 {
		t.Error("start and stop are not in the log")
	}
	if _, err := os.Stat(r.cfg.Agent.Observe.AdminSocket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the admin socket is left: %v", err)
	}
}

// Connections that are open when the agent is told to stop live for stopGrace,
// and are reset then, never ended cleanly.
func TestStopResetsWhatIsOpen(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenDown = rules.Direct
	r.links.set("kas", "other")
	r.diverting()
	open, held := r.carried(r.dial(kas)), r.carried(r.dial(other))
	stopped := time.Now()
	r.stop()
	for _, c := range []net.Conn{open, held} {
		if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("read %d bytes and %v, want a reset", n, err)
		}
	}
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	if took := time.Since(stopped); took < stopGrace || took > stopGrace+2*time.Second {
		t.Errorf("stopped after %s, want %s and little more", took, stopGrace)
	}
	if r.logged(logrus.InfoLevel, "were reset") != 1 || r.logged(logrus.InfoLevel, "connects pass untouched") != 1 {
		t.Error("what became of the connections is not in the log")
	}
}

func TestStopIsQuickWithNothingOpen(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	r.diverting()
	shut(r.carried(r.dial(kas)))
	stopped := time.Now()
	r.stop()
	if err := r.wait(); err != nil || time.Since(stopped) > stopGrace {
		t.Errorf("stopped after %s with %v", time.Since(stopped), err)
	}
	if r.logged(logrus.InfoLevel, "were reset") != 0 {
		t.Error("it speaks of connections")
	}
}

// Whoever the mode lets through, the agent's own sockets are never carried.
func TestOwnConnectionsAreRefused(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	r.diverting()
	at := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), r.mode.Applied()[0].Diverts[0].Ports.Host4)
	c, err := r.cfg.Own.DialContext(t.Context(), "tcp", at.String())
	if err == nil {
		defer shut(c)
		_ = c.SetDeadline(time.Now().Add(bound))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset", err)
	}
	if n := r.metric("kasway_agent_intercept_refused_total"); n != 1 {
		t.Errorf("%v are counted", n)
	}
	r.carried(r.dial(kas))
}

// To be told to stop before the mode is chosen is no failure either.
func TestStopWhileStarting(t *testing.T) {
	r := newRig(t)
	applying := make(chan struct{})
	r.mode.onApply = func(ctx context.Context, _ rules.State) error {
		close(applying)
		<-ctx.Done()
		return ctx.Err()
	}
	r.start()
	<-applying
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	if r.mode.Closed() != 1 {
		t.Error("the mode was not closed")
	}
}

func TestLinksThatEndEndTheAgent(t *testing.T) {
	r := newRig(t)
	broken := errors.New("broken")
	go func() { r.links.fail <- broken }()
	start := time.Now()
	if err := r.fails(); !errors.Is(err, broken) || time.Since(start) >= bound {
		t.Errorf("%v after %s, want the links' error at once", err, time.Since(start))
	}
}

// The errors of all candidates are told, and what they have in common.
func TestNoModeCanBeUsed(t *testing.T) {
	denied := intercept.Report{Err: intercept.ErrPrivilege, Remedy: "run as root"}
	for name, c := range map[string]struct {
		second    intercept.Report
		privilege bool
	}{
		"privilege":   {denied, true},
		"mixed":       {intercept.NotSupported("load ip_set", "no ipset"), false},
		"not working": {intercept.Report{}, false},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			second := newMode()
			second.SetReport(c.second)
			second.onApply = func(context.Context, rules.State) error { return errors.New("no ipset") }
			r.mode.SetReport(denied)
			r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
				return []intercept.Candidate{r.candidate("first"), {Name: "second", New: func() (intercept.Mode, error) { return second, nil }}}, nil
			}
			err := r.fails()
			if errors.Is(err, intercept.ErrPrivilege) != c.privilege {
				t.Errorf("%v is one of privilege: %v", err, !c.privilege)
			}
			for _, says := range []string{"first: missing privilege (run as root)", "second: "} {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
			if r.mode.Closed() != 1 || second.Closed() != 1 {
				t.Error("a mode was not closed")
			}
		})
	}
}

func TestCase_B84_OperatorPortTaken(t *testing.T) {
	for _, taken := range []string{"127.0.0.1:8094", ":8094"} {
		r := newRig(t)
		l, err := net.Listen("tcp", taken)
		if err != nil {
			t.Fatal(err)
		}
		err = r.fails()
		shut(l)
		if !errors.Is(err, syscall.EADDRINUSE) {
			t.Fatalf("%v, want EADDRINUSE", err)
		}
		for _, says := range []string{"operator port", "127.0.0.1:8094", "pid " + strconv.Itoa(os.Getpid()), "observe.address"} {
			if !strings.Contains(err.Error(), says) {
				t.Errorf("%q does not say %q", err, says)
			}
		}
		if len(r.mode.Applied()) != 0 {
			t.Error("diverted all the same")
		}
		r.cfg.Agent.Observe.Address = "127.0.0.1:8096"
		r.cfg.Registry = prometheus.NewRegistry()
		r.diverting()
		r.stop()
		if err := r.wait(); err != nil {
			t.Errorf("with another port: %v", err)
		}
	}
}

func TestAdminSocketInUse(t *testing.T) {
	r := newRig(t)
	l, err := observe.ListenSocket(r.cfg.Agent.Observe.AdminSocket)
	if err != nil {
		t.Fatal(err)
	}
	defer shut(l)
	err = r.fails()
	if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), "observe.adminSocket") || !strings.Contains(err.Error(), r.cfg.Agent.Observe.AdminSocket) {
		t.Errorf("%v, want it to name the socket and the setting", err)
	}
	if c, err := net.Dial("tcp", "127.0.0.1:8094"); err == nil {
		shut(c)
		t.Error("the operators' port is left open")
	}
}

func TestOperatorsPort(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	r.diverting()
	get := func(path string) (int, string) {
		c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
		resp, err := c.Get("http://127.0.0.1:8094" + path)
		if err != nil {
			t.Fatal(err)
		}
		defer shut(resp.Body)
		b, err := io.ReadAll(resp.Body)
		if err != nil {
			t.Fatal(err)
		}
		return resp.StatusCode, string(b)
	}
	if code, body := get("/readyz"); code != http.StatusOK {
		t.Errorf("/readyz: %d %s", code, body)
	}
	r.links.set()
	if code, body := get("/readyz"); code != http.StatusServiceUnavailable || !strings.Contains(body, "kas, other") {
		t.Errorf("/readyz: %d %s", code, body)
	}
	if code, body := get("/livez"); code != http.StatusOK {
		t.Errorf("/livez: %d %s", code, body)
	}
	if _, body := get("/metrics"); !strings.Contains(body, "\nkasway_agent_apply_failures_total 0\n") {
		t.Errorf("/metrics lacks the agent's own:\n%s", body)
	}
}

// listening makes it an agent of mode listen with one target.
func (r *rig) listening() *rig {
	a := parse(r.t, strings.NewReplacer(
		`{name: kas, addresses: ["10.96.0.1:443", "[fd00:96::1]:443"]}`, `{name: kas, addresses: ["kas.invalid:6443"], listen: 6443}`,
		"- {name: other, addresses: [\"10.96.0.2:443\"]}\n", "",
		"clients: [host, pods]", "mode: listen, bindAddress: 169.254.77.2",
	).Replace(text))
	a.Observe.AdminSocket = r.cfg.Agent.Observe.AdminSocket
	r.cfg.Agent = a
	return r
}

// Nothing is left to the garbage collector to close.
func TestEverythingIsClosed(t *testing.T) {
	r := newRig(t).listening()
	r.cfg.NeedWho = true
	defer debug.SetGCPercent(debug.SetGCPercent(-1))
	base := openFiles(t)
	r.diverting()
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	eventually(t, "descriptors closed", func() bool { return openFiles(t) <= base })
}

// In mode listen the self-test goes to the address itself, and names are the
// server's business.
func TestModeListen(t *testing.T) {
	r := newRig(t).listening()
	r.cfg.Lookup = func(context.Context, string, string) ([]netip.Addr, error) {
		t.Error("a name was looked up")
		return nil, errors.New("no")
	}
	r.links.set("kas")
	r.diverting()
	r.carried(net.Dial("tcp", "169.254.77.2:6443"))
	s := r.status()
	if len(s.Bind) != 1 || !s.Ready || len(s.Targets) != 1 || strings.Join(s.Targets[0].Addresses, " ") != "169.254.77.2:6443" {
		t.Errorf("status %+v", s)
	}
}

func TestNodeAddressTaken(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.NodeIPv4 = "169.254.77.9"
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth9"}, PeerName: "far9"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	a, err := netlink.ParseAddr("169.254.77.9/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(link, a); err != nil {
		t.Fatal(err)
	}
	err = r.fails()
	if err == nil || !strings.Contains(err.Error(), "eth9 has it already: choose another intercept.nodeAddresses.ipv4") {
		t.Errorf("%v, want it to name who has it and what to set", err)
	}
	if len(r.mode.Applied()) != 0 {
		t.Error("diverted all the same")
	}
}
