package listen

import (
	"context"
	"errors"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeGuard remembers what it was told.
type fakeGuard struct {
	damage []intercept.Damage
	armed  []netip.AddrPort
	err    error
	beats  atomic.Int64
	closed int
}

func (g *fakeGuard) Arm(_ context.Context, addrs []netip.AddrPort) error {
	g.armed = addrs
	return g.err
}
func (g *fakeGuard) Beat() error  { g.beats.Add(1); return nil }
func (g *fakeGuard) Close() error { g.closed++; return nil }
func (g *fakeGuard) Verify(context.Context) ([]intercept.Damage, error) {
	return g.damage, nil
}

var (
	bind4 = netip.MustParseAddr("169.254.77.2")
	bind6 = netip.MustParseAddr("fd00:77::2")
)

const port = 6443

// lab is a node with mode listen at bind4 and bind6.
type lab struct {
	node  *netns.Host
	mode  *Mode
	guard *fakeGuard
	ports map[string]rules.Ports
	dir   string
}

func newLab(t *testing.T) *lab {
	t.Helper()
	l := &lab{node: netns.New(t, netns.Spec{}).Node, guard: &fakeGuard{}, dir: t.TempDir()}
	log, _ := logtest.NewNullLogger()
	bind := []netip.Addr{bind4, bind6}
	server := intercept.NewServer(intercept.ServerConfig{MaxConnections: 10, Log: log, Handle: func(_ context.Context, t intercept.Taken) {
		_, _ = io.WriteString(t.Conn, t.Target)
		_ = t.Conn.Close()
	}})
	ls := intercept.NewListeners(intercept.ListenersConfig{Addresses: bind, Fixed: true, Server: server})
	t.Cleanup(func() { ls.Close(); _ = server.Shutdown(context.Background()) })
	addrs := intercept.NewNodeAddresses(l.dir, log)
	l.mode = New(Config{
		Bind: bind, Addresses: addrs, Listeners: ls, Log: log,
		Guard: func() (Guard, error) { return l.guard, nil },
	})
	err := l.node.Do(func() error {
		if err := addrs.Ensure(Wanted(bind)...); err != nil {
			return err
		}
		var err error
		l.ports, err = ls.Set(t.Context(), []rules.Target{{Name: "kas", Listen: port}, {Name: intercept.SelfTestName}})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.mode.Close() })
	return l
}

// state is with kas refused or not.
func (l *lab) state(refused bool) rules.State {
	return rules.State{WhenDown: rules.Refuse, Diverts: []rules.Divert{
		{Name: "kas", Ports: l.ports["kas"], Refused: refused},
		{Name: intercept.SelfTestName, Ports: l.ports[intercept.SelfTestName]},
	}}
}

func (l *lab) apply(t *testing.T, s rules.State) {
	t.Helper()
	if err := l.node.Do(func() error { return l.mode.Apply(t.Context(), s) }); err != nil {
		t.Fatal(err)
	}
}

// said is what a connection to at is greeted with.
func (l *lab) said(t *testing.T, at netip.AddrPort) (string, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	c, err := l.node.Dial(ctx, "tcp", at.String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	b, err := io.ReadAll(c)
	return string(b), err
}

func TestApply(t *testing.T) {
	l := newLab(t)
	l.apply(t, l.state(false))
	kas := []netip.AddrPort{netip.AddrPortFrom(bind4, port), netip.AddrPortFrom(bind6, port)}
	if !slices.Equal(l.guard.armed, kas) {
		t.Errorf("guarded %v, want %v and not the self-test", l.guard.armed, kas)
	}
	for _, at := range kas {
		if got, err := l.said(t, at); got != "kas" || err != nil {
			t.Errorf("%s: %q, %v", at, got, err)
		}
	}
	l.apply(t, l.state(true))
	for _, at := range kas {
		if _, err := l.said(t, at); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s while refused: %v", at, err)
		}
	}
	if _, err := l.node.Run("ip", "addr", "del", bind4.String()+"/32", "dev", "lo"); err != nil {
		t.Fatal(err)
	}
	l.apply(t, l.state(false)) // also puts back what somebody took away
	for _, at := range kas {
		if got, err := l.said(t, at); got != "kas" || err != nil {
			t.Errorf("%s after it was refused: %q, %v", at, got, err)
		}
	}
}

func TestWhenDownDirectIsNotSupported(t *testing.T) {
	l := newLab(t)
	s := l.state(false)
	s.WhenDown = rules.Direct
	if err := l.mode.Apply(t.Context(), s); !errors.Is(err, intercept.ErrNotSupported) || l.guard.armed != nil {
		t.Errorf("%v, armed %v", err, l.guard.armed)
	}
}

func TestHeartbeatUntilClose(t *testing.T) {
	l := newLab(t)
	for range 2 { // the second starts no second heartbeat: goleak would see it
		l.apply(t, l.state(false))
	}
	for deadline := time.Now().Add(10 * time.Second); l.guard.beats.Load() < 3; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the guard hears nothing")
		}
	}
	for range 2 {
		if err := l.mode.Close(); err != nil {
			t.Fatal(err)
		}
	}
	if l.guard.closed != 1 {
		t.Errorf("guard closed %d times", l.guard.closed)
	}
}

func TestPreflight(t *testing.T) {
	log := logrus.New()
	log.SetOutput(io.Discard)
	noGuard := errors.New("nft is missing")
	for name, c := range map[string]struct {
		cfg  Config
		err  error
		note string
	}{
		"no address": {cfg: Config{}, err: intercept.ErrNotSupported},
		"guarded":    {cfg: Config{Bind: []netip.Addr{bind4}, Guard: func() (Guard, error) { return &fakeGuard{}, nil }}},
		"no guard":   {cfg: Config{Bind: []netip.Addr{bind4}}, note: "frozen"},
		"no nft":     {cfg: Config{Bind: []netip.Addr{bind4}, Guard: func() (Guard, error) { return nil, noGuard }}, note: noGuard.Error()},
	} {
		c.cfg.Log = log
		r := New(c.cfg).Preflight(t.Context())
		if !errors.Is(r.Err, c.err) || (c.err != nil) != (r.Remedy != "") {
			t.Errorf("%s: %+v", name, r)
		}
		if notes := strings.Join(r.Notes, ""); !strings.Contains(notes, c.note) || c.note == "" && notes != "" {
			t.Errorf("%s: notes %q", name, notes)
		}
	}
}

func TestGuardThatCannotArm(t *testing.T) {
	l := newLab(t)
	l.guard.err = errors.New("no such table")
	err := l.node.Do(func() error { return l.mode.Apply(t.Context(), l.state(false)) })
	if !errors.Is(err, l.guard.err) {
		t.Errorf("Apply: %v", err)
	}
}

// A service of the host's own on the very port is left alone.
func TestCase_B45_OwnServiceOnTheSamePort(t *testing.T) {
	l := newLab(t)
	l.apply(t, l.state(false))
	for _, a := range []netip.Addr{l.node.Addr4, l.node.Addr6, netip.MustParseAddr("127.0.0.1")} {
		own, err := l.node.Listen("tcp", netip.AddrPortFrom(a, port).String())
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := own.Accept()
				if err != nil {
					return
				}
				_, _ = io.WriteString(c, "own service")
				c.Close()
			}
		}()
		if got, err := l.said(t, netip.AddrPortFrom(a, port)); got != "own service" || err != nil {
			t.Errorf("%s: %q, %v", a, got, err)
		}
		own.Close()
		<-done
	}
}

func TestCleanupAndSnapshot(t *testing.T) {
	node := netns.New(t, netns.Spec{}).Node
	log, _ := logtest.NewNullLogger()
	dir := t.TempDir()
	around := netns.Around{Trees: []string{dir}}
	before, err := node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	err = node.Do(func() error {
		if err := intercept.NewNodeAddresses(dir, log).Ensure(Wanted([]netip.Addr{bind4, bind6})...); err != nil {
			return err
		}
		return errors.Join(intercept.CleanupAddresses(dir), intercept.CleanupAddresses(dir))
	})
	if err != nil {
		t.Fatal(err)
	}
	after, err := node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	for kind := range before {
		if !slices.Equal(before[kind], after[kind]) {
			t.Errorf("%s: %q, before %q", kind, after[kind], before[kind])
		}
	}
}
