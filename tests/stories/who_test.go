package stories

import (
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// attributing are modes that tell clients apart in different ways.
var attributing = []string{"nft", "ebpf"}

// conns asks the running agent who talks to the KAS.
func (s *scene) conns(t *testing.T, args ...string) (all []agent.ConnStatus) {
	t.Helper()
	out, err := s.Run(append([]string{"conns", "-o", "json", "--admin-socket", s.Path("agent.sock")}, args...)...)
	if err == nil {
		err = json.Unmarshal([]byte(out), &all)
	}
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// connOf waits until c is listed and fits.
func (s *scene) connOf(t *testing.T, c net.Conn, fits func(agent.ConnStatus) bool) (got agent.ConnStatus) {
	t.Helper()
	client := c.LocalAddr().(*net.TCPAddr).AddrPort()
	err := netns.Poll(patience, func() error {
		all := s.conns(t)
		i := slices.IndexFunc(all, func(a agent.ConnStatus) bool { return a.Client == client })
		if i < 0 {
			return fmt.Errorf("not among %d connections", len(all))
		}
		if got = all[i]; !fits(got) {
			return fmt.Errorf("shown as %+v", got)
		}
		return nil
	})
	if err != nil {
		t.Errorf("the connection of %s: %v", client, err)
	}
	return got
}

// hold opens a connection that stays, and sends 5 bytes on it.
func hold(t *testing.T, h *netns.Host, to netip.AddrPort) net.Conn {
	t.Helper()
	c, err := h.Dial(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(c) })
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	return c
}

// Who connects is seen by operators of the node and of the control plane, and
// asked for by rules; what a process or a cgroup is called breaks nothing.
func TestWhoConnects(t *testing.T) {
	t.Parallel()
	for _, mode := range attributing {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			if s.NodeCgroup() == "" {
				t.Skip("no cgroup 2 in which clients could be told apart")
			}
			file := s.file(t, "agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
guard:
  rules:
  - {action: deny, units: [cron.service]}
`)
			flags := append(diverting(mode, "-f", file), "--target", "closed="+etcd.String(), "--log-level", "debug")
			s.start(t, flags, "--log-level", "debug")
			stop, err := stack.Mirror(s.ControlPlane, raw4, raw6)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(stop)
			t.Run("is listed", func(t *testing.T) { s.isListed(t, mode) })
			t.Run("is asked for", s.isAskedFor)
			t.Run("is on record", s.isOnRecord)
			t.Run("may be called anything", func(t *testing.T) { s.isCalledAnything(t, mode) })
		})
	}
}

// isListed: the host's client by its unit, the pod's by its uid where the mode
// knows, and as a pod in any case.
func (s *scene) isListed(t *testing.T, mode string) {
	for _, to := range []netip.AddrPort{raw4, raw6} {
		c := hold(t, s.Node, to)
		got := s.connOf(t, c, func(a agent.ConnStatus) bool { return a.State == intercept.ConnOpen && a.Sent == 5 })
		if got.Target != "raw" || got.Unit != "kubelet.service" || got.Workload != "kubelet.service" || got.UID == nil || *got.UID != 0 ||
			got.Pod || got.Original != to || (got.PID != 0) != (mode == "ebpf") {
			t.Errorf("the host's client is shown as %+v", got)
		}
	}
	pod := s.RoutedPods[0]
	got := s.connOf(t, hold(t, pod, raw4), func(a agent.ConnStatus) bool { return a.State == intercept.ConnOpen })
	if known := mode == "ebpf"; !got.Pod || (got.PodUID == pod.PodUID && got.ContainerID == pod.ContainerID) != known || (got.Workload != "") != known {
		t.Errorf("the pod %s is shown as %+v", pod.PodUID, got)
	}
	for _, args := range [][]string{{"conns"}, {"status"}} {
		out, err := s.Run(append(args, "--admin-socket", s.Path("agent.sock"))...)
		if err != nil || !strings.Contains(out, "raw") {
			t.Errorf("%v: %v", args, err)
		}
		t.Logf("kasway-agent %s:\n%s", args[0], out)
	}
	if n := len(s.conns(t, "--workload", "kubelet", "--target", "raw")); n != 2 {
		t.Errorf("%d connections of the kubelet, want 2", n)
	}
	if n := metric(t, s.agent, "kasway_agent_attribution_lost_total"); n != 0 {
		t.Errorf("of %v clients it was lost who they are", n)
	}
}

// inUnit is a request by a process in a cgroup of the node.
func (s *scene) inUnit(t *testing.T, cgroup, program string, to netip.AddrPort) (exit int) {
	t.Helper()
	c := s.Node.Command(program, "--silent", "--show-error", "--insecure", "--max-time", "8", "https://"+to.String()+"/version").Cgroup(cgroup)
	exit, out, err := stack.ExitOf(c)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%s at %s: exit %d: %s", cgroup, to, exit, strings.TrimSpace(out))
	return exit
}

// isAskedFor: a rule denies one unit and no other.
func (s *scene) isAskedFor(t *testing.T) {
	for _, to := range []netip.AddrPort{svc4, kas6} {
		if exit := s.inUnit(t, "system.slice/cron.service", "curl", to); exit != 7 && exit != 35 {
			t.Errorf("the denied unit at %s: curl's exit code is %d, want 7 or 35", to, exit)
		}
		// A cgroup within another unit may have any name.
		for _, other := range []string{"system.slice/crond.service", "user.slice/user-7.slice/user@7.service/cron.service"} {
			if exit := s.inUnit(t, other, "curl", to); exit != 0 {
				t.Errorf("%s at %s: curl's exit code is %d", other, to, exit)
			}
		}
	}
	logged(t, s.agent, 0, "refused by policy", `"workload":"cron.service"`, `"uid":0`, `"reason":"rule"`)
}

// isOnRecord: the server's log names the node's client, both of what it carries
// and of what it refuses.
func (s *scene) isOnRecord(t *testing.T) {
	logged(t, s.server, 0, "connection ended", `"target":"kas"`, `"workload":"crond.service"`, `"uid":0`, `"node":`)
	isCut(t, "a client of what the server does not allow", s.Node, etcd)
	logged(t, s.server, 0, "refused by policy", "spiffe://kasway/agent/node", `"workload":"kubelet.service"`, `"uid":0`)
}

// isCalledAnything: a long cgroup path and a command that is no text.
func (s *scene) isCalledAnything(t *testing.T, mode string) {
	curl, err := filepath.EvalSymlinks("/usr/bin/curl")
	if err != nil {
		t.Fatal(err)
	}
	program := filepath.Join(t.TempDir(), "é\n\x01")
	if err := os.Symlink(curl, program); err != nil {
		t.Fatal(err)
	}
	// The kernel takes any name of a cgroup without a newline.
	cgroup := strings.Repeat("é\x01", 80) + "/" + strings.Repeat("y", 150)
	if exit := s.inUnit(t, cgroup, program, kas4); exit != 0 {
		t.Errorf("curl's exit code is %d", exit)
	}
	want := []string{"connection ended", `"workload":"cgroup /é\\x01é\\x01`}
	if mode == "ebpf" {
		want = append(want, `"command":"é\\n\\x01"`)
	}
	logged(t, s.agent, 0, want...)
	logged(t, s.server, 0, want...)
}
