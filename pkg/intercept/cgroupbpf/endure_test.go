package cgroupbpf

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// descriptors are those that this process has open.
func descriptors(t *testing.T) int {
	t.Helper()
	open, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(open)
}

// A closed mode keeps nothing open but the two maps by which connections are known
// that it took before, however often it was applied.
func TestCloseGivesDescriptorsBack(t *testing.T) {
	g := newGround(t)
	before := descriptors(t)
	m := New(Config{Cgroup: g.cgroup, PinDir: g.pins})
	for range 3 {
		for range 2 {
			if err := m.Apply(t.Context(), g.state(rules.Direct)); err != nil {
				t.Fatal(err)
			}
		}
		if d := m.Detail(); len(d) != 1 || !strings.Contains(d[0], g.cgroup) || !strings.Contains(d[0], g.pins) {
			t.Errorf("detail %q, want the cgroup and the directory of pins", d)
		}
		if err := m.Close(); err != nil {
			t.Fatal(err)
		}
		if d := m.Detail(); d != nil {
			t.Errorf("detail of a closed mode: %q", d)
		}
	}
	if n := descriptors(t); n != before+2 {
		t.Errorf("%d descriptors are open, %d before; want two more", n, before)
	}
	m.know(nil)
	if n := descriptors(t); n != before {
		t.Errorf("%d descriptors are open in the end, %d before", n, before)
	}
}

// inForce is the id of the map that decides at this moment.
func (m *Mode) inForce(t *testing.T) (id uint32) {
	t.Helper()
	if err := m.installed.objects.KwTargets.Lookup(uint32(0), &id); err != nil {
		t.Fatal(err)
	}
	return id
}

// An Apply that fails leaves what was in force, and says what to do.
func TestFailedLaterApply(t *testing.T) {
	g := newGround(t)
	m := g.agent(t, rules.Refuse)
	before := m.inForce(t)
	many := g.state(rules.Refuse)
	many.Diverts[0].Entries = nil
	for i := range 4097 {
		a := netip.AddrFrom4([4]byte{10, 0, byte(i >> 8), byte(i)})
		many.Diverts[0].Entries = append(many.Diverts[0].Entries, rules.Entry{Prefix: netip.PrefixFrom(a, 32), Port: 443})
	}
	if err := m.Apply(t.Context(), many); err == nil || !strings.Contains(err.Error(), "4097") || !strings.Contains(err.Error(), "write prefixes") {
		t.Errorf("4097 addresses: %v; want an error that names a remedy", err)
	}
	if err := m.Apply(t.Context(), rules.State{}); err == nil {
		t.Error("a state without targets was applied")
	}
	// Nothing can be pinned here: there is a directory in the way.
	remove(t, m.pin("connect4"))
	if err := os.MkdirAll(m.pin("connect4/in/the/way"), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := m.Apply(t.Context(), g.state(rules.Direct)); err == nil || !strings.Contains(err.Error(), "connect4") {
		t.Errorf("a pin that cannot be made: %v", err)
	}
	if m.inForce(t) != before || !m.installed.refuse {
		t.Error("a failed Apply has replaced what was in force")
	}
	g.hooked(t)
	if err := os.RemoveAll(m.pin("connect4")); err != nil {
		t.Fatal(err)
	}
	many.Diverts[0].Entries = many.Diverts[0].Entries[:4096]
	if err := m.Apply(t.Context(), many); err != nil {
		t.Errorf("4096 addresses: %v", err)
	}
	if m.inForce(t) == before {
		t.Error("nothing was replaced")
	}
	g.hooked(t)
}

// A cgroup that has gone for good is told as long as that lasts, and is no reason
// to fail when the agent stops.
func TestCgroupGoneForGood(t *testing.T) {
	g := newGround(t)
	under := ground{filepath.Join(g.cgroup, "under"), g.pins}
	if err := os.Mkdir(under.cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	m := under.agent(t, rules.Refuse)
	remove(t, under.cgroup)
	for range 2 {
		if err := m.Apply(t.Context(), under.state(rules.Refuse)); err == nil {
			t.Error("a cgroup that is gone was attached to")
		}
		damage, err := m.Verify(t.Context())
		if err != nil || !strings.Contains(describe(damage), "nothing is attached") {
			t.Errorf("%q, %v; want that nothing is attached", describe(damage), err)
		}
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

// Several may clean up at once, beside an agent that repairs.
func TestCleanupsAtOnce(t *testing.T) {
	g := newGround(t)
	m := g.agent(t, rules.Refuse)
	var wg sync.WaitGroup
	for range 3 {
		wg.Go(func() {
			for range 5 {
				if err := CleanupPins(context.Background(), g.pins); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 5 {
		if err := m.Apply(t.Context(), g.state(rules.Refuse)); err != nil {
			t.Error(err)
		}
	}
	wg.Wait()
	if err := m.Apply(t.Context(), g.state(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	g.hooked(t)
	if err := CleanupPins(t.Context(), g.pins); err != nil {
		t.Fatal(err)
	}
	g.empty(t)
	if damage, err := m.Verify(t.Context()); err != nil || len(damage) == 0 {
		t.Errorf("a living agent whose programs were cleaned up: %q, %v", describe(damage), err)
	}
}

// An agent that has CAP_BPF and CAP_NET_ADMIN alone may not look at programs that
// it did not load. It tells its successor from a stranger all the same.
func TestVerifyWithoutSysAdmin(t *testing.T) {
	verified := func(m *Mode) (text string, err error) {
		done := make(chan struct{})
		go func() {
			defer close(done)
			runtime.LockOSThread() // and never unlock: the thread ends without its capability
			if err = dropSysAdmin(); err != nil {
				return
			}
			damage, verr := m.Verify(context.Background())
			text, err = describe(damage), verr
		}()
		<-done
		return text, err
	}
	g := newGround(t)
	m := g.agent(t, rules.Refuse)
	if err := m.installed.links["connect4"].link.Update(passing(t)); err != nil {
		t.Fatal(err)
	}
	if text, err := verified(m); err != nil || !strings.Contains(text, "connect4 has been replaced") {
		t.Errorf("a stranger's program: %q, %v", text, err)
	}
	if err := m.Apply(t.Context(), g.state(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	g.agent(t, rules.Refuse)
	if text, err := verified(m); err != nil || text != "" {
		t.Errorf("a successor's programs: %q, %v", text, err)
	}
}

func dropSysAdmin() error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var sets [2]unix.CapUserData
	if err := unix.Capget(&header, &sets[0]); err != nil {
		return err
	}
	sets[0].Effective &^= 1 << unix.CAP_SYS_ADMIN
	if err := unix.Capset(&header, &sets[0]); err != nil {
		return err
	}
	if capable(unix.CAP_SYS_ADMIN) {
		return errors.New("this thread still has CAP_SYS_ADMIN")
	}
	return nil
}

// Every connect to a target counts once, for who it is from.
func TestConnectsAreCounted(t *testing.T) {
	t.Parallel()
	p := newInProcess(t, netns.Spec{RoutedPods: 1})
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	m.read(p.mode.installed.objects.KwCounts)
	m.name(rules.State{Diverts: []rules.Divert{{Name: "kas"}, {Name: "other"}}})
	for _, c := range []struct {
		from   *netns.Host
		target string
		times  int
	}{{p.Node, "kas", 7}, {p.RoutedPods[0], "kas", 2}, {p.RoutedPods[0], "other", 3}} {
		for range c.times {
			conn, err := c.from.Dial(t.Context(), "tcp", atPort(targetPorts[c.target]).String())
			if err != nil {
				t.Fatal(err)
			}
			conn.Close()
		}
	}
	want := "kas/host/diverted 7 kas/pods/diverted 2 other/pods/diverted 3"
	if got := strings.Join(nonZero(t, reg), " "); got != want {
		t.Errorf("counted %q, want %q", got, want)
	}
}

// An Apply that waits for another process, which may be frozen, does not make
// the node take this agent for dead.
func TestBeatsWhileApplyWaits(t *testing.T) {
	g := newGround(t)
	m := g.agent(t, rules.Refuse)
	beat := func() (at uint64) {
		if err := m.installed.objects.KwBeat.Lookup(uint32(0), &at); err != nil {
			t.Error(err)
		}
		return at
	}
	applied := make(chan error, 1)
	err := locked(g.pins, false, func() error {
		go func() { applied <- m.Apply(t.Context(), g.state(rules.Refuse)) }()
		if err := netns.Poll(5*time.Second, func() error {
			if m.mu.TryLock() {
				m.mu.Unlock()
				return errors.New("Apply has not begun")
			}
			return nil
		}); err != nil {
			return err
		}
		before := beat()
		return netns.Poll(5*time.Second, func() error {
			if beat() == before {
				return errors.New("no heartbeat while Apply waits")
			}
			return nil
		})
	})
	if err := errors.Join(err, <-applied); err != nil {
		t.Error(err)
	}
}
