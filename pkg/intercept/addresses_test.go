package intercept

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"

	"github.com/kasway/kasway/tests/netns"
)

// in runs f in a fresh node and gives it a command runner.
func in(t *testing.T, f func(run func(line string) string)) {
	t.Helper()
	netns.Require(t)
	lab, err := netns.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(lab) })
	h, err := lab.Host("node")
	if err != nil {
		t.Fatal(err)
	}
	run := func(line string) string {
		args := strings.Fields(line)
		out, err := h.Run(args[0], args[1:]...)
		if err != nil {
			t.Errorf("%s: %v", line, err)
		}
		return out
	}
	if err := h.Do(func() error { f(run); return nil }); err != nil {
		t.Fatal(err)
	}
}

func TestNodeAddresses(t *testing.T) {
	in(t, func(run func(string) string) {
		log, hook := logs(t)
		dir := filepath.Join(t.TempDir(), "state")
		before := run("ip -o addr") + run("ip route show table all") + run("ip -6 route show table all")
		run("ip link add eth0 type veth peer name far")
		run("ip addr add 169.254.3.4/16 dev eth0") // a node with zeroconf is none with our address
		run("ip link set eth0 up")
		n := NewNodeAddresses(dir, log)
		a6, err := n.Node6()
		if err != nil || !a6.IsPrivate() {
			t.Fatalf("Node6: %s, %v", a6, err)
		}
		if again, err := NewNodeAddresses(dir, log).Node6(); again != a6 || err != nil {
			t.Errorf("after a restart %s, %v, want %s again", again, err, a6)
		}
		want := []NodeAddress{{Addr: node4}, {Addr: a6}, {Addr: loopback()[0]}}
		for range 3 {
			if err := n.Ensure(want...); err != nil {
				t.Fatal(err)
			}
		}
		if len(hook.AllEntries()) != 2 {
			t.Errorf("%d addresses added, want 2", len(hook.AllEntries()))
		}
		lo := run("ip -o addr show dev lo")
		for _, has := range []string{"inet 169.254.77.1/32 scope host lo:kasway", "inet6 " + a6.String() + "/128"} {
			if !strings.Contains(lo, has) {
				t.Errorf("lo lacks %q:\n%s", has, lo)
			}
		}
		if !strings.Contains(run("ip -o addr show dev lo deprecated"), a6.String()) {
			t.Error("the node may use its pods' address as a source of its own")
		}
		for _, f := range []string{node6File, addressesFile} {
			if fi, err := os.Stat(filepath.Join(dir, f)); err != nil || fi.Mode() != 0o600 {
				t.Errorf("%s: %v, %v", f, fi, err)
			}
		}
		run("ip addr del 169.254.77.1/32 dev lo")
		if err := n.Ensure(want...); err != nil || !strings.Contains(run("ip -o addr show dev lo"), "169.254.77.1") {
			t.Errorf("not repaired: %v", err)
		}

		run("ip link del eth0")
		for range 2 {
			if err := CleanupAddresses(dir); err != nil {
				t.Fatal(err)
			}
		}
		if after := run("ip -o addr") + run("ip route show table all") + run("ip -6 route show table all"); after != before {
			t.Errorf("left over:\n%s\nbefore:\n%s", after, before)
		}
		if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("the state directory is left: %v", err)
		}
	})
}

func TestNodeAddressesRefuseWhatIsSomebodys(t *testing.T) {
	for name, c := range map[string]struct{ setup, says string }{
		"another interface": {"ip addr add 169.254.77.1/32 dev eth0", "eth0 has it already"},
		"host route":        {"ip route add 169.254.77.1 dev eth0", "routed already, to 169.254.77.1/32 dev eth0"},
		"network":           {"ip route add 169.254.77.0/24 dev eth0", "routed already, to 169.254.77.0/24 dev eth0"},
		"another table":     {"ip route add 169.254.77.0/24 dev eth0 table 77", "routed already"},
		"blackhole":         {"ip route add blackhole 169.254.77.1", "routed already"},
	} {
		t.Run(name, func(t *testing.T) {
			in(t, func(run func(string) string) {
				run("ip link add eth0 type veth peer name far")
				run("ip link set eth0 up")
				run(c.setup)
				log, _ := logs(t)
				before := run("ip -o addr show dev lo")
				want := NodeAddress{Addr: node4, Setting: "intercept.nodeIPv4"}
				for _, err := range []error{CheckNodeAddress(want), NewNodeAddresses(t.TempDir(), log).Ensure(want)} {
					if err == nil || !strings.Contains(err.Error(), c.says) || !strings.Contains(err.Error(), "intercept.nodeIPv4") {
						t.Errorf("%v, want it to say %q and what to set", err, c.says)
					}
				}
				if after := run("ip -o addr show dev lo"); after != before {
					t.Errorf("refused and added all the same:\n%s", after)
				}
			})
		})
	}
}

// Checking changes nothing, and agrees with Ensure on what may be used.
func TestCheckNodeAddress(t *testing.T) {
	in(t, func(run func(string) string) {
		run("ip link add eth0 type veth peer name far")
		run("ip addr add 192.0.2.1/24 dev eth0")
		run("ip link set eth0 up")
		log, _ := logs(t)
		ours := NodeAddress{Addr: node4}
		for _, w := range []NodeAddress{ours, {Addr: loopback()[0]}, {Addr: netip.MustParseAddr("192.0.2.1"), Borrow: true}} {
			before := run("ip -o addr")
			if err := CheckNodeAddress(w); err != nil {
				t.Errorf("%s: %v", w.Addr, err)
			}
			if after := run("ip -o addr"); after != before {
				t.Errorf("the check of %s leaves\n%s\nbefore:\n%s", w.Addr, after, before)
			}
		}
		if err := NewNodeAddresses(t.TempDir(), log).Ensure(ours); err != nil {
			t.Fatal(err)
		}
		if err := CheckNodeAddress(ours); err != nil {
			t.Errorf("where an agent runs or has run: %v", err)
		}
	})
}

// An address that an operator has put somewhere is used and left there.
func TestNodeAddressesBorrow(t *testing.T) {
	in(t, func(run func(string) string) {
		run("ip link add eth0 type veth peer name far")
		run("ip addr add 192.0.2.1/24 dev eth0")
		run("ip addr add 192.0.2.2/32 dev lo")
		run("ip link set eth0 up")
		log, _ := logs(t)
		dir := t.TempDir()
		before := run("ip -o addr")
		var want []NodeAddress
		for _, a := range []string{"192.0.2.1", "192.0.2.2", "192.0.2.3"} {
			want = append(want, NodeAddress{Addr: netip.MustParseAddr(a), Borrow: true})
		}
		if err := NewNodeAddresses(dir, log).Ensure(want...); err != nil {
			t.Fatal(err)
		}
		if !strings.Contains(run("ip -o addr show dev lo"), "192.0.2.3/32") {
			t.Error("the missing one was not added")
		}
		if err := CleanupAddresses(dir); err != nil {
			t.Fatal(err)
		}
		if after := run("ip -o addr"); after != before {
			t.Errorf("after the clean-up:\n%s\nbefore:\n%s", after, before)
		}
		if _, err := os.Stat(dir); err != nil {
			t.Errorf("a state directory that was there before: %v", err)
		}
	})
}

func TestCleanupWithoutMemory(t *testing.T) {
	in(t, func(run func(string) string) {
		log, _ := logs(t)
		before := run("ip -o addr")
		n := NewNodeAddresses(t.TempDir(), log)
		a6, err := n.Node6()
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Ensure(NodeAddress{Addr: node4}, NodeAddress{Addr: a6}); err != nil {
			t.Fatal(err)
		}
		if err := CleanupAddresses(filepath.Join(t.TempDir(), "lost")); err != nil {
			t.Fatal(err)
		}
		if after := run("ip -o addr"); after != before {
			t.Errorf("left over:\n%s", after)
		}
	})
}

// A memory cut short must not keep the node from being cleaned up.
func TestCleanupWithBrokenMemory(t *testing.T) {
	in(t, func(run func(string) string) {
		log, _ := logs(t)
		before := run("ip -o addr")
		dir := t.TempDir()
		n := NewNodeAddresses(dir, log)
		a6, err := n.Node6()
		if err != nil {
			t.Fatal(err)
		}
		if err := n.Ensure(NodeAddress{Addr: node4}, NodeAddress{Addr: a6}); err != nil {
			t.Fatal(err)
		}
		path := filepath.Join(dir, addressesFile)
		if err := os.WriteFile(path, nil, 0o600); err != nil {
			t.Fatal(err)
		}
		if err := CleanupAddresses(dir); err == nil || !strings.Contains(err.Error(), path) {
			t.Errorf("%v, want an error that names %s", err, path)
		}
		if after := run("ip -o addr"); after != before {
			t.Errorf("left over:\n%s", after)
		}
		if err := CleanupAddresses(dir); err != nil {
			t.Errorf("again: %v", err)
		}
	})
}

func TestNode6BrokenFile(t *testing.T) {
	log, _ := logs(t)
	dir := t.TempDir()
	path := filepath.Join(dir, node6File)
	if err := os.WriteFile(path, []byte("10.0.0.1\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if a, err := NewNodeAddresses(dir, log).Node6(); err == nil || !strings.Contains(err.Error(), path) {
		t.Errorf("%s, %v, want an error that names the file", a, err)
	}
	m := addressMemory{Added: []netip.Addr{node4}, MadeDir: true}
	s := addressState{dir}
	if err := s.save(m); err != nil {
		t.Fatal(err)
	}
	if got, err := s.load(); err != nil || !reflect.DeepEqual(got, m) {
		t.Errorf("%+v, %v", got, err)
	}
}
