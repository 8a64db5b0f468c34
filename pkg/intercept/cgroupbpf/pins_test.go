package cgroupbpf

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// ground is a cgroup and a bpffs of the test's own, without any client.
type ground struct{ cgroup, pins string }

func newGround(t *testing.T) ground {
	t.Helper()
	g := ground{cgroup: ownRoot(t)}
	fs := t.TempDir()
	if err := unix.Mount("bpf", fs, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(fs, 0); err != nil {
			t.Error(err)
		}
	})
	g.pins = filepath.Join(fs, "kasway")
	return g
}

// under is a cgroup below that of g.
func (g ground) under(t *testing.T) ground {
	t.Helper()
	u := ground{filepath.Join(g.cgroup, "under"), g.pins}
	if err := os.Mkdir(u.cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { remove(t, u.cgroup) })
	return u
}

// documentation is an address that nobody has.
var documentation = netip.MustParseAddr("192.0.2.1")

func (g ground) state(when rules.WhenDown) rules.State {
	return rules.State{
		Clients: rules.Clients{Pods: true}, WhenDown: when, Mark: intercept.Mark, MarkMask: intercept.Mark, Node4: testNode4,
		Diverts: []rules.Divert{{
			Name: "kas", Entries: []rules.Entry{{Prefix: netip.PrefixFrom(documentation, 32), Port: 6443}}, Ports: rules.Ports{Pod4: 1},
		}},
	}
}

// agent is a Mode that diverts here. It is closed at the end, without its guard.
func (g ground) agent(t *testing.T, when rules.WhenDown) *Mode {
	t.Helper()
	m := New(Config{Cgroup: g.cgroup, PinDir: g.pins})
	if err := m.Apply(t.Context(), g.state(when)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		m.know(nil)
		if err := CleanupPins(context.Background(), g.pins); err != nil { // the test's own has ended
			t.Error(err)
		}
	})
	return m
}

// hooked are the programs that the hooks run, each of which has exactly one.
func (g ground) hooked(t *testing.T) (programs []uint32) {
	t.Helper()
	all, err := netns.AttachedTo(g.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, a := range all {
		names, programs = append(names, a.Hook), append(programs, a.Program)
	}
	if slices.Sort(names); len(names) != len(hooks) || len(slices.Compact(names)) != len(hooks) {
		t.Errorf("there are programs at %v, want one at each of %d hooks", names, len(hooks))
	}
	return programs
}

// empty fails the test unless nothing is attached and nothing is pinned.
func (g ground) empty(t *testing.T) {
	t.Helper()
	leftNothing(t, g.cgroup)
	if _, err := os.Stat(g.pins); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s: %v, want that it is gone", g.pins, err)
	}
}

func (m *Mode) pin(hook string) string { return filepath.Join(m.installed.dir, hook) }

// wound is something that befalls a running agent.
type wound struct {
	name  string
	harm  func(t *testing.T, g ground, m *Mode)
	wants string // in the damage; "": there is none
}

var wounds = []wound{
	{"nothing", func(*testing.T, ground, *Mode) {}, ""},
	{"pin removed", func(t *testing.T, _ ground, m *Mode) { remove(t, m.pin("connect4")) }, "connect4 is missing"},
	{"pin of the heartbeat removed", func(t *testing.T, _ ground, m *Mode) { remove(t, m.pin(beatPin)) }, "beat is missing"},
	{"all pins removed", func(t *testing.T, _ ground, m *Mode) {
		if err := os.RemoveAll(m.installed.dir); err != nil {
			t.Fatal(err)
		}
	}, "connect6 is missing"},
	{"detached", func(t *testing.T, _ ground, m *Mode) {
		if err := m.installed.links["connect6"].link.Detach(); err != nil {
			t.Fatal(err)
		}
	}, "connect6 is attached no longer"},
	{"replaced by a stranger", func(t *testing.T, _ ground, m *Mode) {
		if err := m.installed.links["connect4"].link.Update(passing(t)); err != nil {
			t.Fatal(err)
		}
	}, "connect4 has been replaced"},
	{"taken over by one that lives", func(t *testing.T, g ground, _ *Mode) { g.agent(t, rules.Refuse) }, ""},
	{"taken over by one that died", func(t *testing.T, g ground, _ *Mode) {
		if err := g.agent(t, rules.Refuse).Close(); err != nil { // beats no more, stays hooked
			t.Fatal(err)
		}
	}, "dead or older"},
	{"taken back by an older one", func(t *testing.T, g ground, m *Mode) {
		for _, h := range hooks {
			old, err := m.installed.links[h.name].link.Info()
			if err != nil {
				t.Fatal(err)
			}
			m.installed.links[h.name].program = old.Program + 1 // as if it were the newer
		}
	}, "dead or older"},
}

func remove(t *testing.T, path string) {
	t.Helper()
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}

// What is not as it was left is named, and put right by the next Apply.
func TestVerify(t *testing.T) {
	for _, w := range wounds {
		t.Run(w.name, func(t *testing.T) {
			g := newGround(t)
			m := g.agent(t, rules.Refuse)
			w.harm(t, g, m)
			damage, err := m.Verify(t.Context())
			if err != nil {
				t.Fatal(err)
			}
			if text := describe(damage); !strings.Contains(text, w.wants) || w.wants == "" && text != "" {
				t.Errorf("damage %q, want %q", text, w.wants)
			}
			if err := m.Apply(t.Context(), g.state(rules.Refuse)); err != nil {
				t.Fatal(err)
			}
			if damage, err := m.Verify(t.Context()); err != nil || len(damage) != 0 {
				t.Errorf("after the repair: %q, %v", describe(damage), err)
			}
			own := m.installed.links["connect4"].program
			if !slices.Contains(g.hooked(t), uint32(own)) {
				t.Error("connect4 does not run this agent's program")
			}
		})
	}
}

func describe(damage []intercept.Damage) string {
	var all []string
	for _, d := range damage {
		all = append(all, d.What)
	}
	return strings.Join(all, "; ")
}

// The cgroup itself may go, and come again as another one.
func TestVerifyWithoutCgroup(t *testing.T) {
	g := newGround(t)
	under := g.under(t)
	m := under.agent(t, rules.Refuse)
	old := m.installed.dir
	remove(t, under.cgroup)
	damage, err := m.Verify(t.Context())
	if err != nil || !strings.Contains(describe(damage), "is gone") {
		t.Errorf("%q, %v; want that the cgroup is gone", describe(damage), err)
	}
	if err := os.Mkdir(under.cgroup, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := m.Apply(t.Context(), under.state(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	under.hooked(t)
	if _, err := os.Stat(old); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the pins of the cgroup that has gone: %v", err)
	}
}

// Close keeps the guard in force or leaves nothing, as it was told; and never
// touches what another agent has taken over.
func TestClose(t *testing.T) {
	t.Run("direct", func(t *testing.T) {
		g := newGround(t)
		m := g.agent(t, rules.Direct)
		for range 2 {
			if err := m.Close(); err != nil {
				t.Error(err)
			}
			g.empty(t)
		}
		if err := m.Apply(t.Context(), g.state(rules.Direct)); err != nil {
			t.Error(err)
		}
		g.hooked(t)
	})
	t.Run("refuse", func(t *testing.T) {
		g := newGround(t)
		m := g.agent(t, rules.Refuse)
		before := g.hooked(t)
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		if after := g.hooked(t); !slices.Equal(before, after) {
			t.Errorf("the hooks run %v, want the guard %v", after, before)
		}
	})
	for _, when := range []rules.WhenDown{rules.Direct, rules.Refuse} {
		t.Run("superseded "+string(when), func(t *testing.T) {
			g := newGround(t)
			old, young := g.agent(t, when), g.agent(t, when)
			before := g.hooked(t)
			if err := old.Close(); err != nil {
				t.Error(err)
			}
			if after := g.hooked(t); !slices.Equal(before, after) {
				t.Errorf("the hooks run %v, want the successor's %v", after, before)
			}
			if damage, err := young.Verify(t.Context()); err != nil || len(damage) != 0 {
				t.Errorf("the successor: %q, %v", describe(damage), err)
			}
			if !young.installed.relieved() {
				t.Error("the successor's heartbeat is not the one that beats")
			}
		})
	}
	t.Run("nothing is left to close", func(t *testing.T) {
		g := newGround(t)
		m := g.agent(t, rules.Direct)
		if err := os.RemoveAll(g.pins); err != nil {
			t.Fatal(err)
		}
		if err := m.Close(); err != nil {
			t.Error(err)
		}
		g.empty(t)
	})
}

// An Apply that fails half-way leaves nothing: here somebody's program suffers no
// other beside it on the last hook.
func TestFailedFirstApply(t *testing.T) {
	g := newGround(t)
	under := g.under(t)
	dir, err := os.Open(g.cgroup)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	p := passingAt(t, ebpf.AttachCGroupInet6Connect)
	if err := link.RawAttachProgram(link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet6Connect}); err != nil {
		t.Fatal(err)
	}
	m := New(Config{Cgroup: under.cgroup, PinDir: g.pins})
	if err := m.Apply(t.Context(), g.state(rules.Refuse)); err == nil || !strings.Contains(err.Error(), "connect6") {
		t.Errorf("Apply: %v, want an error that names connect6", err)
	}
	leftNothing(t, under.cgroup)
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := CleanupPins(t.Context(), g.pins); err != nil {
		t.Error(err)
	}
	m.know(nil)
}

// Cleanup needs neither a configuration nor an agent, and removes what agents of
// every cgroup have left, whichever of their pins remain; twice, if need be.
func TestCleanupPins(t *testing.T) {
	g := newGround(t)
	other := ground{ownRoot(t), g.pins}
	if err := g.agent(t, rules.Refuse).Close(); err != nil {
		t.Fatal(err)
	}
	m := other.agent(t, rules.Refuse)
	remove(t, m.pin("connect4"))
	if err := m.Close(); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := CleanupPins(t.Context(), g.pins); err != nil {
			t.Error(err)
		}
		g.empty(t)
		other.empty(t)
	}
}
