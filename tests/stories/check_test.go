package stories

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// caps runs what follows with these capabilities and no others.
func caps(names ...string) []string {
	set := "-all"
	for _, n := range names {
		set += ",+" + n
	}
	return []string{"setpriv", "--bounding-set", set, "--inh-caps", set, "--"}
}

// shut away, what follows sees itself as process 1, and its part of the tree of
// cgroups, or none of it, in place of the machine's.
func shutAway(script string) []string {
	return []string{"unshare", "--cgroup", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "sh", "-c", script + ` && exec "$0" "$@"`}
}

const (
	ownCgroups = "mount -t cgroup2 none /sys/fs/cgroup"
	noCgroups  = "mount -t tmpfs none /sys/fs/cgroup"
)

// checkScene is a node on which an agent could start at once.
func checkScene(t *testing.T, spec netns.Spec) *scene {
	t.Helper()
	s := newScene(t, spec)
	if s.NodeCgroup() == "" {
		t.Skip("no cgroup 2 to attach to")
	}
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.firewall, err = s.ControlPlane.FirewallHere(stack.Port); err != nil {
		t.Fatal(err)
	}
	return s
}

// checks runs the agent's check under a command; flags come last, and win.
func (s *scene) checks(t *testing.T, under []string, code int, flags []string, texts ...string) {
	t.Helper()
	s.Under = under
	defer func() { s.Under = nil }()
	args := slices.Concat([]string{"check"}, diverting("auto"), s.AgentFlags(), flags)
	exits(t, s, code, "agent", args, texts...)
}

// A check tells what there is, what is missing, why that matters and what to do
// about it, with the exit code of the contract; and it leaves nothing behind.
func TestCheck(t *testing.T) {
	t.Parallel()
	s := checkScene(t, netns.Spec{BridgePods: 1, BridgeNF: true})
	around := netns.Around{Trees: []string{s.Dir}, Cgroups: []string{s.NodeCgroup()}}
	before, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	attaches := "note: attaches to " + s.NodeCgroup() + " (id "
	ebpf := []string{"--mode", "ebpf"}
	s.checks(t, nil, 0, nil, "ebpf would be used\n", attaches, "nft would be used if ebpf failed", "NetworkPolicy, ebpf", "handshake in")
	s.checks(t, caps("net_admin", "bpf"), 0, nil, "ebpf would be used\n", attaches)
	s.checks(t, caps("net_admin"), 0, nil, "nft would be used\n", "unused", "CAP_BPF (to load programs)", "why: it diverts at connect()", "remedy: run the agent as root, or with CAP_BPF and CAP_NET_ADMIN")
	s.checks(t, caps("net_admin"), 77, ebpf, "missing privilege: mode ebpf", "CAP_BPF (to load programs)", "why: no connection reaches the agent without it", "remedy: run the agent as root")
	s.checks(t, caps("bpf"), 77, ebpf, "missing privilege: mark of own sockets, mode ebpf", "CAP_NET_ADMIN (to attach them", "remedy: run the agent as root", "SO_MARK")
	s.checks(t, caps(), 77, nil, "missing privilege: mark of own sockets, mode", "CAP_BPF (to load programs) and CAP_NET_ADMIN", "none of these can be used", "remedy: meet the needs")
	s.checks(t, shutAway(noCgroups), 1, append(ebpf, "--cgroup", "auto"), "the root of all cgroups is not in sight", "why: no connection", "remedy: give the agent the node's whole tree of cgroups")
	s.checks(t, shutAway(ownCgroups), 1, append(ebpf, "--cgroup", "auto"), "/sys/fs/cgroup: only a part of the tree", "remedy: give the agent the node's whole tree of cgroups")
	s.checks(t, shutAway(ownCgroups), 0, []string{"--cgroup", "auto"}, "nft would be used\n", "/sys/fs/cgroup: only a part of the tree")
	s.checks(t, nil, 1, append(ebpf, "--cgroup", "/tmp"), "/tmp is no directory of cgroup 2", "remedy: name a directory below ")
	s.checks(t, nil, 1, append(ebpf, "--cgroup", s.NodeCgroup()+"/none"), "no such file", "remedy: make the cgroup before the agent starts")
	s.checks(t, nil, 1, []string{"--mode", "tproxy"}, "bridge cni0 has ports and bridge-nf-call-iptables", "remedy: set the sysctls net.bridge.bridge-nf-call-iptables")
	after, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range before.Diff(after) {
		t.Errorf("a check has changed %s", d)
	}
	if pins, err := s.pins(); err != nil || len(pins) > 0 {
		t.Errorf("a check has pinned %q, %v", pins, err)
	}
}

// pins are those of agents in the lab's bpffs.
func (s *scene) pins() ([]string, error) {
	dir, err := s.BPFFS()
	if err != nil {
		return nil, err
	}
	return filepath.Glob(filepath.Join(dir, "kasway", "*", "*"))
}

// In a container that sees but its own part of the tree of cgroups the hooks
// would catch nobody but the agent: another mode is used, and said why.
func TestCase_B52_PrivateCgroupNamespace(t *testing.T) {
	t.Parallel()
	s := checkScene(t, netns.Spec{RoutedPods: 1})
	s.Under = shutAway(ownCgroups)
	s.startAgent(t, diverting("auto", "--cgroup", "auto")...)
	s.Under = nil
	logged(t, s.agent, 0, "interception mode skipped", `"mode":"ebpf"`, "only a part of the tree", "hostPath /sys/fs/cgroup")
	st := s.status(t)
	if st.Mode != "nft" || len(st.Skipped) != 1 || !strings.Contains(st.Skipped[0].Reason, "only a part of the tree") {
		t.Errorf("mode %s, skipped %+v; want nft, and why not ebpf", st.Mode, st.Skipped)
	}
	for _, h := range s.clients() {
		s.served(t, h, svc4)
	}
	if all, err := netns.AttachedTo(s.NodeCgroup()); err != nil || len(all) > 0 {
		t.Errorf("attached: %v, %v", all, err)
	}
}

// The cgroup in which an agent has started goes away under it, as a container's
// does when its runtime puts the process elsewhere. The hooks are not there.
func TestCase_B51_DyingSubCgroup(t *testing.T) {
	t.Parallel()
	s := checkScene(t, netns.Spec{RoutedPods: 1})
	s.AgentCgroup = "system.slice/short.scope"
	s.Under = []string{"unshare", "--cgroup", "--"}
	s.startAgent(t, diverting("ebpf")...)
	s.Under = nil
	own := filepath.Join(s.NodeCgroup(), s.AgentCgroup)
	s.moveAway(t, own, s.agent.Process.Pid)
	for _, h := range s.clients() {
		s.served(t, h, svc4)
		s.served(t, h, kas6)
	}
	var node syscall.Stat_t
	if err := syscall.Stat(s.NodeCgroup(), &node); err != nil {
		t.Fatal(err)
	}
	want := fmt.Sprintf("attached to %s (id %d,", s.NodeCgroup(), node.Ino)
	if out, err := s.Run("status", "--admin-socket", s.agent.Socket); err != nil || !strings.Contains(out, want) {
		t.Errorf("status does not say %q (%v):\n%s", want, err, out)
	}
	all, err := netns.AttachedTo(s.NodeCgroup())
	if err != nil || len(all) != 5 {
		t.Errorf("attached to the node's cgroup: %v, %v; want five hooks", all, err)
	}

	// Whoever looks only now, from there, is not misled by what it sees.
	s.AgentCgroup = "system.slice/dying.scope"
	gate := s.Path("gate")
	if _, err := s.Node.Run("mkfifo", gate); err != nil {
		t.Fatal(err)
	}
	s.Under = shutAway(ownCgroups + ` && echo >"` + gate + `" && read go <"` + gate + `"`)
	done := make(chan struct{})
	go func() {
		defer close(done)
		args := slices.Concat([]string{"check"}, s.AgentFlags(), diverting("ebpf", "--cgroup", "auto"))
		exits(t, s, 1, "agent", args, "a cgroup that has been removed (inode ")
	}()
	if _, err := os.ReadFile(gate); err != nil {
		t.Fatal(err)
	}
	dying := filepath.Join(s.NodeCgroup(), s.AgentCgroup)
	s.moveAway(t, dying, 0)
	if err := os.WriteFile(gate, []byte("\n"), 0); err != nil {
		t.Fatal(err)
	}
	<-done
	s.Under = nil
}

// moveAway moves everybody, among them pid, from a cgroup to its parent's
// neighbour, and removes it.
func (s *scene) moveAway(t *testing.T, cgroup string, pid int) {
	t.Helper()
	to := filepath.Join(s.NodeCgroup(), "elsewhere")
	if err := os.Mkdir(to, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		t.Fatal(err)
	}
	err := netns.Poll(patience, func() error {
		text, err := os.ReadFile(filepath.Join(cgroup, "cgroup.procs"))
		if err != nil {
			return err
		}
		if pid != 0 && !slices.Contains(strings.Fields(string(text)), fmt.Sprint(pid)) {
			t.Errorf("the agent is not in %s: %q", cgroup, text)
		}
		pid = 0
		for _, p := range strings.Fields(string(text)) {
			if err := os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(p), 0); err != nil {
				return err
			}
		}
		return os.Remove(cgroup)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// What an agent may do decides how it diverts: in the best way that it can, or
// not at all, and then it says so.
func TestCase_B64_DroppedPrivileges(t *testing.T) {
	t.Parallel()
	for mode, c := range map[string][]string{"ebpf": {"net_admin", "bpf"}, "nft": {"net_admin"}, "": nil} {
		t.Run("as "+mode, func(t *testing.T) {
			t.Parallel()
			s := checkScene(t, netns.Spec{RoutedPods: 1})
			s.Under = caps(c...)
			if mode == "" {
				run := slices.Concat([]string{"run"}, s.AgentFlags(), diverting("auto"))
				exits(t, s, 77, "agent", run, "missing privilege", "CAP_NET_ADMIN")
				return
			}
			s.startAgent(t, diverting("auto")...)
			s.Under = nil
			if st := s.status(t); st.Mode != mode {
				t.Errorf("with %v the mode is %s, want %s; skipped: %+v", c, st.Mode, mode, st.Skipped)
			}
			for _, h := range s.clients() {
				s.served(t, h, svc4)
				s.served(t, h, kas6)
			}
		})
	}
}
