package agent

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/tests/netns"
)

// The agent puts addresses on lo, from several goroutines.
func TestMain(m *testing.M) {
	netns.Isolate()
	goleak.VerifyTestMain(m)
}

// bound is what nothing here takes unless it never happens.
const bound = 20 * time.Second

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(bound); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// backToBase fails t unless at its end no more descriptors are open than now.
func backToBase(t *testing.T) {
	t.Helper()
	// The poller's own descriptors come with the first socket, and stay.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	shut(l)
	base := openFiles(t)
	t.Cleanup(func() {
		eventually(t, "descriptors closed", func() bool {
			runtime.GC() // package net pools the pipes that it splices with
			return openFiles(t) <= base
		})
	})
}

// shut closes what a test has no more use for.
func shut(c io.Closer) { _ = c.Close() }

const text = `
apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
targets:
- {name: kas, addresses: ["10.96.0.1:443", "[fd00:96::1]:443"]}
- {name: other, addresses: ["10.96.0.2:443"]}
intercept: {clients: [host, pods], stateDir: DIR/state}
links: {servers: ["192.0.2.1:8091"]}
identity: {certificate: DIR/crt, key: DIR/key, ca: DIR/ca}
observe: {address: "127.0.0.1:8094", adminSocket: DIR/agent.sock}
`

// Where clients dial.
var (
	kas   = netip.MustParseAddrPort("10.96.0.1:443")
	other = netip.MustParseAddrPort("10.96.0.2:443")
)

func parse(t *testing.T, text string) config.Agent {
	t.Helper()
	c, err := config.ParseAgent("agent.yaml", []byte(strings.ReplaceAll(text, "DIR", t.TempDir())))
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// rig is an agent with everything around it in memory, but for its addresses,
// its listeners and its self-test.
type rig struct {
	t     *testing.T
	cfg   Config
	links *links
	mode  *mode
	hook  *logtest.Hook
	stop  context.CancelFunc
	done  chan error
}

// newRig makes an agent that is not started; its links carry nothing yet.
func newRig(t *testing.T) *rig {
	t.Helper()
	netns.Require(t)
	backToBase(t)
	r := &rig{t: t, links: newLinks(), mode: newMode(), done: make(chan error, 1)}
	var log *logrus.Logger
	log, r.hook = logtest.NewNullLogger()
	log.SetLevel(logrus.DebugLevel)
	a := parse(t, text)
	r.cfg = Config{
		Agent: a, Generation: "gen1", Dial: echo(t), Links: r.links, Own: intercept.NewOwnSockets(intercept.Mark, intercept.Mark),
		Modes: func(Parts) (try, others []intercept.Candidate) {
			return []intercept.Candidate{r.candidate("fake")}, nil
		},
		Registry: prometheus.NewRegistry(), Log: log,
	}
	return r
}

func (r *rig) candidate(name string) intercept.Candidate {
	return intercept.Candidate{Name: name, New: func() (intercept.Mode, error) { return r.mode, nil }}
}

// start starts it; it is stopped, if it still runs, at the end of the test.
func (r *rig) start() *rig {
	ctx, stop := context.WithCancel(context.Background())
	r.stop = stop
	go func() { r.done <- Run(ctx, r.cfg) }()
	r.t.Cleanup(func() {
		stop()
		if err := r.wait(); err != nil {
			r.t.Errorf("Run: %v", err)
		}
		if err := intercept.CleanupAddresses(r.cfg.Agent.Intercept.StateDir); err != nil {
			r.t.Error(err)
		}
	})
	return r
}

// diverting starts it and waits until it diverts.
func (r *rig) diverting() *rig {
	r.t.Helper()
	r.start()
	eventually(r.t, "diverting", func() bool {
		s, err := r.ask()
		return err == nil && s.Mode != ""
	})
	return r
}

// wait returns what Run returned; again and again.
func (r *rig) wait() error {
	select {
	case err := <-r.done:
		r.done <- err
		return err
	case <-time.After(bound):
		r.t.Fatal("Run does not end")
		return nil
	}
}

// fails runs an agent that must end by itself.
func (r *rig) fails() error {
	r.t.Helper()
	ctx, stop := context.WithTimeout(context.Background(), bound)
	defer stop()
	err := Run(ctx, r.cfg)
	if err == nil {
		r.t.Error("it ran")
	}
	if cerr := intercept.CleanupAddresses(r.cfg.Agent.Intercept.StateDir); cerr != nil {
		r.t.Error(cerr)
	}
	return err
}

// ask is the status on the admin socket.
func (r *rig) ask() (s Status, err error) {
	resp, err := observe.SocketClient(r.cfg.Agent.Observe.AdminSocket).Get("http://agent/status")
	if err != nil {
		return s, err
	}
	defer shut(resp.Body)
	return s, json.NewDecoder(resp.Body).Decode(&s)
}

func (r *rig) status() Status {
	r.t.Helper()
	s, err := r.ask()
	if err != nil {
		r.t.Fatal(err)
	}
	return s
}

// ready is the answer of the operators' port.
func (r *rig) ready() string {
	r.t.Helper()
	resp, err := observe.SocketClient(r.cfg.Agent.Observe.AdminSocket).Get("http://agent/readyz")
	if err != nil {
		r.t.Fatal(err)
	}
	defer shut(resp.Body)
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		r.t.Fatal(err)
	}
	return strings.TrimSpace(string(b))
}

// dial connects as a diverted process of the host.
func (r *rig) dial(to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	c, err := r.mode.Dial(ctx, to, false)
	if err == nil {
		r.t.Cleanup(func() { shut(c) })
		err = c.SetDeadline(time.Now().Add(bound))
	}
	return c, err
}

// carried fails the test unless bytes sent on c come back.
func (r *rig) carried(c net.Conn, err error) net.Conn {
	r.t.Helper()
	const text = "through"
	got := make([]byte, len(text))
	if err == nil {
		_, err = io.WriteString(c, text)
	}
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err != nil || string(got) != text {
		r.t.Errorf("echo %q, %v", got, err)
	}
	return c
}

func (r *rig) metric(name string) (sum float64) {
	r.t.Helper()
	families, err := r.cfg.Registry.Gather()
	if err != nil {
		r.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			if f.GetName() == name {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return sum
}

func (r *rig) logged(level logrus.Level, message string) (n int) {
	for _, e := range r.hook.AllEntries() {
		if e.Level == level && strings.Contains(e.Message, message) {
			n++
		}
	}
	return n
}

// echo is a way to targets that send back what they get.
func echo(t *testing.T) dial.Func {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				_, _ = io.Copy(c, c)
				shut(c)
			}()
		}
	}()
	t.Cleanup(func() { shut(l) })
	return func(ctx context.Context, target dial.Target) (dial.Conn, error) {
		if !slices.Contains([]string{"kas", "other"}, target.Name) {
			return nil, errors.New("no such target: " + target.Name)
		}
		c, err := new(net.Dialer).DialContext(ctx, "tcp", l.Addr().String())
		if err != nil {
			return nil, err
		}
		return dial.NewTCP(c.(*net.TCPConn)), nil
	}
}

var update = flag.Bool("update", false, "write the golden files anew")

func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name)
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s, want\n%s\ngot\n%s", name, want, got)
	}
}
