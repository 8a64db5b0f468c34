package netns

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"unsafe"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Each kind of leftover is planted once and must show up in the difference.
func TestSnapshotSeesEveryKindOfLeftover(t *testing.T) {
	topo := New(t, Spec{})
	node := topo.Node
	dir := t.TempDir()
	cgroup := topo.cgroup
	around := Around{BPF: []string{"kwtest"}, Trees: []string{dir}}
	if cgroup != "" {
		around.Trees = append(around.Trees, cgroup)
		around.Cgroups = append(around.Cgroups, cgroup)
	}
	run := func(line string) func() error {
		return func() error {
			f := strings.Fields(line)
			_, err := node.Run(f[0], f[1:]...)
			return err
		}
	}
	plants := map[string]func() error{
		"nft":              run("nft add table inet kwtest"),
		"iptables-nft":     run("iptables-nft -t nat -N KWTEST"),
		"ip6tables-nft":    run("ip6tables-nft -t nat -A OUTPUT -p tcp -j RETURN"),
		"iptables-legacy":  run("iptables-legacy -t nat -N KWTEST"),
		"ip6tables-legacy": run("ip6tables-legacy -t filter -A INPUT -p tcp -j RETURN"),
		"ipset":            run("ipset create kwtest hash:ip,port timeout 5"),
		"rules":            run("ip -4 rule add pref 90 lookup 27511"),
		"rules6":           run("ip -6 rule add pref 90 lookup 27511"),
		"routes":           run("ip -4 route add local 198.51.100.1 dev lo table 27511"),
		"routes6":          run("ip -6 route add local 2001:db8::1 dev lo table 27511"),
		"addresses":        run("ip addr add 169.254.77.1/32 dev lo"),
		"links": func() error {
			attrs := netlink.NewLinkAttrs()
			attrs.Name = "kwtest"
			return node.nl.LinkAdd(&netlink.Bridge{LinkAttrs: attrs})
		},
		"sysctl": func() error { return node.Sysctl("net/ipv4/conf/lo/route_localnet", "1") },
		"bpf":    func() error { return plantMap(t, "kwtest_map") },
		dir:      func() error { return os.WriteFile(filepath.Join(dir, "left.sock"), nil, 0o600) },
		cgroup:   func() error { return os.Mkdir(filepath.Join(cgroup, "left"), 0o755) },

		"attached " + cgroup: func() error { forbid(t, topo.Node.CgroupPath()); return nil },
	}
	if cgroup == "" {
		delete(plants, cgroup)
		delete(plants, "attached "+cgroup)
	}
	snap := func() Snapshot {
		t.Helper()
		s, err := node.Snapshot(around)
		if err != nil {
			t.Fatal(err)
		}
		return s
	}
	before := snap()
	if diff := before.Diff(snap()); len(diff) > 0 {
		t.Fatalf("looking changes what is seen:\n%s", strings.Join(diff, "\n"))
	}
	if len(plants) < len(before)-1 { // cgroup and state directory are both trees
		t.Errorf("%d kinds are looked at and %d are planted", len(before), len(plants))
	}
	for kind, plant := range plants {
		if err := plant(); err != nil {
			t.Errorf("%s: %v", kind, err)
			continue
		}
		after := snap()
		found := false
		for _, line := range before.Diff(after) {
			found = found || strings.HasPrefix(line, kind+": +")
		}
		if !found {
			t.Errorf("%s: a leftover is not seen; the difference is %q", kind, before.Diff(after))
		}
		before = after
	}
}

// Counters, and what iptables itself never removes, are no leftovers.
func TestSnapshotIgnoresTraces(t *testing.T) {
	node := New(t, Spec{}).Node
	before, err := node.Snapshot(Around{})
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"iptables-nft -t nat -N KWTEST", "iptables-nft -t nat -X KWTEST",
		"iptables-legacy -t nat -N KWTEST", "iptables-legacy -t nat -X KWTEST",
		"ip6tables-nft -t nat -S", "ip6tables-legacy -t nat -S",
	} {
		f := strings.Fields(line)
		if _, err := node.Run(f[0], f[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	after, err := node.Snapshot(Around{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(after); len(diff) > 0 {
		t.Errorf("difference:\n%s", strings.Join(diff, "\n"))
	}
}

func TestDiffSeesWhatHasGone(t *testing.T) {
	a := Snapshot{"routes": {"default via 192.0.2.1"}}
	if d := a.Diff(Snapshot{}); len(d) != 1 || d[0] != "routes: -default via 192.0.2.1" {
		t.Errorf("got %q", d)
	}
}

// plantMap makes a BPF array of one element that lives as long as the test.
func plantMap(t *testing.T, name string) error {
	attr := struct {
		mapType, keySize, valueSize, maxEntries, flags, innerFD, numaNode uint32
		name                                                              [16]byte
	}{mapType: unix.BPF_MAP_TYPE_ARRAY, keySize: 4, valueSize: 8, maxEntries: 1}
	copy(attr.name[:], name)
	fd, _, e := unix.Syscall(unix.SYS_BPF, unix.BPF_MAP_CREATE, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr))
	if e != 0 {
		return e
	}
	t.Cleanup(func() { _ = unix.Close(int(fd)) })
	return nil
}
