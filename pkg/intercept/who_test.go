package intercept

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/pkg/workload"
	"github.com/kasway/kasway/tests/netns"
)

// knowing is a Mode that knows of one client.
type knowing struct {
	a     Attribution
	known bool
}

func (knowing) Preflight(context.Context) Report              { return Report{} }
func (knowing) Apply(context.Context, rules.State) error      { return nil }
func (knowing) Verify(context.Context) ([]Damage, error)      { return nil, nil }
func (knowing) Close() error                                  { return nil }
func (k knowing) Attribute(Taken) (a Attribution, known bool) { return k.a, k.known }

// unknowing is a Mode that is no Attributor.
type unknowing struct{ Mode }

// taken is an accepted connection of this process.
func taken(t *testing.T, fromHost bool) Taken {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(l) })
	client := dialTo(t, unmapped(l.Addr()))
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(c) })
	side := PodSide
	if fromHost {
		side = HostSide
	}
	return Taken{
		Conn: c.(*net.TCPConn), Target: "kas", Side: side, FromHost: fromHost,
		Peer: unmapped(client.LocalAddr()), Local: unmapped(l.Addr()),
	}
}

// newWho makes a Who that knows sockets and, if it is given, the cgroup.
func newWho(t *testing.T, x *workload.Index) (*Who, *Metrics) {
	t.Helper()
	sockets, err := NewSockets()
	if err != nil {
		t.Fatal(err)
	}
	m := NewMetrics(nil)
	w := NewWho(WhoConfig{Sockets: sockets, Workloads: x, Metrics: m})
	t.Cleanup(w.Close)
	return w, m
}

func (w *Who) target(t *testing.T, c Taken) (target dial.Target) {
	t.Helper()
	who, err := w.find(c)
	if err != nil {
		t.Errorf("original destination: %v", err)
	}
	target.Pod = !c.FromHost
	who.describe(&target)
	return target
}

// The client's user and cgroup are found although connection tracking knows
// nothing.
func TestWhoByTheSocket(t *testing.T) {
	w, m := newWho(t, nil)
	host := taken(t, true)
	client, err := w.find(host)
	if err != nil || !client.UIDKnown || client.UID != uint32(os.Getuid()) || client.CgroupID != ownCgroup(t) {
		t.Errorf("host client: %+v, %v", client, err)
	}
	// A pod's address says nothing about this host's sockets, and nothing is lost.
	if got := w.target(t, taken(t, false)); got.UIDKnown || got.UnitKnown || !got.Pod {
		t.Errorf("pod: %+v", got)
	}
	if n := testutil.ToFloat64(m.lost); n != 0 {
		t.Errorf("%v counted as lost", n)
	}
	shut(w.cfg.Sockets)
	if got := w.target(t, host); got.UIDKnown || got.UnitKnown {
		t.Errorf("host client of whom nothing is known: %+v", got)
	}
	if n := testutil.ToFloat64(m.lost); n != 1 {
		t.Errorf("%v counted as lost, want 1", n)
	}
}

// What the mode knows comes first; what it has lost of the host's clients is
// asked of their sockets, and what it has lost of pods is nowhere.
func TestWhoByTheMode(t *testing.T) {
	w, m := newWho(t, nil)
	kas := netip.MustParseAddrPort("10.96.0.1:443")
	all := Attribution{Original: kas, UID: 7, UIDKnown: true, PID: 42, Command: "kubelet"}
	w.SetMode(knowing{all, true})
	for _, fromHost := range []bool{true, false} {
		got := w.target(t, taken(t, fromHost))
		if got.Original != kas || got.UID != 7 || !got.UIDKnown || got.PID != 42 || got.Command != "kubelet" || got.UnitKnown {
			t.Errorf("from the host: %v: %+v", fromHost, got)
		}
	}
	// A pod can put words about an address of the host into what is kept of pods.
	direct := taken(t, true)
	direct.Side = PodSide
	if got := w.target(t, direct); got.UID != uint32(os.Getuid()) || got.Command != "" {
		t.Errorf("of the host, at the pods' listener: %+v", got)
	}
	w.SetMode(knowing{all, false})
	if got := w.target(t, taken(t, true)); got.UID != uint32(os.Getuid()) || !got.UIDKnown || got.PID != 0 || got.Original == kas {
		t.Errorf("lost, of the host: %+v", got)
	}
	if n := testutil.ToFloat64(m.lost); n != 0 {
		t.Errorf("%v counted as lost", n)
	}
	if got := w.target(t, taken(t, false)); got.UIDKnown || got.Command != "" || got.Original.IsValid() {
		t.Errorf("lost, of a pod: %+v", got)
	}
	if n := testutil.ToFloat64(m.lost); n != 1 {
		t.Errorf("%v counted as lost, want 1", n)
	}
	w.SetMode(unknowing{})
	if got := w.target(t, taken(t, false)); got.UIDKnown {
		t.Errorf("the mode before is still asked: %+v", got)
	}
}

// cgroups is an index of a tree with one cgroup at path, and the id of that.
func cgroups(t *testing.T, path string) (*workload.Index, uint64) {
	t.Helper()
	netns.Require(t)
	root := "/sys/fs/cgroup/unified"
	if _, err := workload.NewIndex(root); err != nil {
		root = "/sys/fs/cgroup"
		if _, err = workload.NewIndex(root); err != nil {
			t.Skip(err)
		}
	}
	// The first directory stands for the node.
	path = fmt.Sprintf("kasway-test-who-%d/%s", os.Getpid(), path)
	dir := filepath.Join(root, path)
	t.Cleanup(func() {
		for ; dir != root; dir = filepath.Dir(dir) {
			_ = os.Remove(dir) // what was not made is no loss
		}
	})
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	info, err := os.Stat(dir)
	if err != nil {
		t.Fatal(err)
	}
	node, _, _ := strings.Cut(path, "/")
	x, err := workload.NewIndex(filepath.Join(root, node))
	if err != nil {
		t.Fatal(err)
	}
	return x, info.Sys().(*syscall.Stat_t).Ino
}

func TestWhoKnowsUnits(t *testing.T) {
	x, id := cgroups(t, "system.slice/kubelet.service")
	w, m := newWho(t, x)
	w.SetMode(knowing{Attribution{CgroupID: id, UIDKnown: true}, true})
	if got := w.target(t, taken(t, true)); got.Unit != "kubelet.service" || !got.UnitKnown || got.Workload != "kubelet.service" {
		t.Errorf("of the host: %+v", got)
	}
	// A pod is not the host's unit, whatever its cgroup is called.
	if got := w.target(t, taken(t, false)); got.Unit != "" || got.UnitKnown || got.Workload != "kubelet.service" {
		t.Errorf("of a pod: %+v", got)
	}
	w.SetMode(knowing{Attribution{CgroupID: 1 << 60, UIDKnown: true}, true})
	if got := w.target(t, taken(t, true)); got.UnitKnown || got.Workload != "" || !got.UIDKnown {
		t.Errorf("of a cgroup that is no more: %+v", got)
	}
	if n := testutil.ToFloat64(m.lost); n != 1 {
		t.Errorf("%v counted as lost, want 1", n)
	}
}

// Whatever processes and cgroups are called, their connections work, and what
// is logged stays one line of printable text.
func TestCase_B96_AnyNameIsLoggedEscaped(t *testing.T) {
	const comm = "é\n\x01"
	x, id := cgroups(t, strings.Repeat("é\x01", 50)+"/"+strings.Repeat("y", 199))
	for name, a := range map[string]Attribution{
		"command":     {UID: 7, UIDKnown: true, PID: 42, Command: comm},
		"not utf-8":   {PID: 42, Command: "\xff\x00\x1b[2J"},
		"long cgroup": {CgroupID: id, Command: comm},
	} {
		t.Run(name, func(t *testing.T) {
			w, _ := newWho(t, x)
			w.SetMode(knowing{a, true})
			s := tellWho(t, w, 0, nil)
			client, far := s.pair(t)
			send(t, client, "x")
			readN(t, far, 1)
			target := <-s.got
			if target.Command != a.Command || target.PID != a.PID {
				t.Errorf("target %+v", target)
			}
			shut(client)
			shut(far)
			eventually(t, "its end is logged", func() bool { return len(s.forwarded.AllEntries()) >= 2 })
			for _, e := range s.forwarded.AllEntries() {
				wantPrintable(t, e)
				if e.Data["command"] == nil || id == a.CgroupID && e.Data["workload"] == nil {
					t.Errorf("%s says nothing of who: %v", e.Message, e.Data)
				}
			}
		})
	}
}

func wantPrintable(t *testing.T, e *logrus.Entry) {
	t.Helper()
	for key, v := range e.Data {
		if s, ok := v.(string); ok && (len(s) > 900 || strings.ContainsFunc(s, func(r rune) bool { return r < ' ' || r == 0x7f || r == '\uFFFD' })) {
			t.Errorf("%s is %q", key, s)
		}
	}
}

// What finding out costs each connection.
func BenchmarkWho(b *testing.B) {
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		b.Fatal(err)
	}
	defer shut(l)
	client, err := net.Dial("tcp4", l.Addr().String())
	if err != nil {
		b.Fatal(err)
	}
	defer shut(client)
	c, err := l.Accept()
	if err != nil {
		b.Fatal(err)
	}
	defer shut(c)
	sockets, err := NewSockets()
	if err != nil {
		b.Fatal(err)
	}
	defer shut(sockets)
	x, err := workload.NewIndex("/sys/fs/cgroup/unified")
	if err != nil {
		b.Skip(err)
	}
	w := NewWho(WhoConfig{Sockets: sockets, Workloads: x})
	t := Taken{Conn: c.(*net.TCPConn), Peer: unmapped(client.LocalAddr()), Local: unmapped(l.Addr()), FromHost: true}
	for b.Loop() {
		if got, err := w.find(t); err != nil || !got.WorkloadKnown {
			b.Fatalf("%+v, %v", got, err)
		}
	}
}
