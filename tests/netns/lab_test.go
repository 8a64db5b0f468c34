package netns

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// serve accepts on addr of h and tells each client who it seems to be.
func serve(t *testing.T, h *Host, addr netip.AddrPort) {
	t.Helper()
	l, err := h.Listen("tcp", addr.String())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte(c.RemoteAddr().String() + " " + c.LocalAddr().String() + "\n"))
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
}

// ask connects and returns the peer and local address that the server saw.
func ask(t *testing.T, from *Host, to netip.AddrPort) (peer, local string) {
	t.Helper()
	c, err := from.Dial(t.Context(), "tcp", to.String())
	if err != nil {
		t.Fatalf("%s to %s: %v", from.Label, to, err)
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(5 * time.Second))
	buf := make([]byte, 200)
	n, _ := c.Read(buf)
	peer, local, _ = strings.Cut(strings.TrimSpace(string(buf[:n])), " ")
	host, _, err := net.SplitHostPort(peer)
	if err != nil {
		t.Fatalf("%s to %s: got %q", from.Label, to, buf[:n])
	}
	return host, local
}

func everything(t *testing.T) *Topology {
	return New(t, Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true, Neighbour: true})
}

func TestTopologyReaches(t *testing.T) {
	topo := everything(t)
	kas4, kas6 := netip.AddrPortFrom(KAS4, 6443), netip.AddrPortFrom(KAS6, 6443)
	serve(t, topo.ControlPlane, kas4)
	serve(t, topo.ControlPlane, kas6)
	for _, h := range []*Host{topo.Node, topo.RoutedPods[0], topo.BridgedPods[0]} {
		for to, want := range map[netip.AddrPort]netip.Addr{kas4: h.Addr4, kas6: h.Addr6} {
			if peer, _ := ask(t, h, to); peer != want.String() {
				t.Errorf("%s to %s: seen as %s, want its own %s", h.Label, to, peer, want)
			}
		}
	}
}

func TestKubeProxyTranslates(t *testing.T) {
	for _, kind := range KubeProxies[1:] {
		t.Run(string(kind), func(t *testing.T) {
			topo := everything(t)
			kas4, kas6 := netip.AddrPortFrom(KAS4, 6443), netip.AddrPortFrom(KAS6, 6443)
			serve(t, topo.ControlPlane, kas4)
			serve(t, topo.ControlPlane, kas6)
			svc4 := Service{ClusterIP: netip.AddrPortFrom(ClusterIP4, 443), Endpoint: kas4, Pods: netip.MustParsePrefix("10.77.0.0/16")}
			svc6 := Service{ClusterIP: netip.AddrPortFrom(ClusterIP6, 443), Endpoint: kas6, Pods: netip.MustParsePrefix("fd00:77::/32")}
			if err := topo.Node.InstallKubeProxy(kind, svc4, svc6); err != nil {
				t.Fatal(err)
			}
			for _, h := range []*Host{topo.Node, topo.RoutedPods[0], topo.BridgedPods[0]} {
				for _, s := range []Service{svc4, svc6} {
					if _, local := ask(t, h, s.ClusterIP); local != s.Endpoint.String() {
						t.Errorf("%s to %s: arrived at %s, want %s", h.Label, s.ClusterIP, local, s.Endpoint)
					}
				}
			}
		})
	}
}

func TestFirewallDropsAllButOnePort(t *testing.T) {
	topo := everything(t)
	cp, open := topo.ControlPlane, netip.AddrPortFrom(topo.ControlPlane.Addr4, 8091)
	kas4, kas6 := netip.AddrPortFrom(KAS4, 6443), netip.AddrPortFrom(KAS6, 6443)
	for _, a := range []netip.AddrPort{open, kas4, kas6} {
		serve(t, cp, a)
	}
	var probes []Probe
	for _, h := range []*Host{topo.Node, topo.RoutedPods[0], topo.BridgedPods[0], topo.Neighbour} {
		if h != topo.Neighbour { // which has no route to the addresses on lo
			probes = append(probes, Probe{h, kas4}, Probe{h, kas6})
		}
	}
	var fw *Firewall
	err := CutOff(probes, 300*time.Millisecond, func() (err error) {
		fw, err = cp.FirewallHere(open.Port())
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := (Probe{topo.Node, open}).Reach(time.Second); err != nil {
		t.Errorf("the open port: %v", err)
	}
	in, _, err := fw.Drops()
	if err != nil || in < uint64(len(probes)) {
		t.Errorf("dropped %d packets in, %v; want one for each of %d probes at least", in, err, len(probes))
	}
	if err := fw.Remove(); err != nil {
		t.Fatal(err)
	}
	if err := probes[0].Reach(time.Second); err != nil {
		t.Errorf("after Remove: %v", err)
	}
}

// The other way: what the control plane sends first is dropped as well.
func TestFirewallTowardDropsBothWays(t *testing.T) {
	topo := New(t, Spec{})
	kubelet := netip.AddrPortFrom(topo.Node.Addr4, 10250)
	serve(t, topo.Node, kubelet)
	serve(t, topo.ControlPlane, netip.AddrPortFrom(topo.ControlPlane.Addr4, 8091))
	var fw *Firewall
	err := CutOff([]Probe{{topo.ControlPlane, kubelet}}, 300*time.Millisecond, func() (err error) {
		fw, err = topo.Node.FirewallToward(8091)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if in, out, err := fw.Drops(); err != nil || in == 0 || out != 0 {
		t.Errorf("dropped %d in, %d out, %v; want some in and none out", in, out, err)
	}
	if err := (Probe{topo.Node, netip.AddrPortFrom(topo.ControlPlane.Addr4, 8091)}).Reach(time.Second); err != nil {
		t.Error(err)
	}
}

func TestCutOffNoticesAnOpenWay(t *testing.T) {
	topo := New(t, Spec{})
	to := netip.AddrPortFrom(topo.ControlPlane.Addr4, 8091)
	serve(t, topo.ControlPlane, to)
	nothing := func() error { return nil }
	if CutOff([]Probe{{topo.Node, to}}, time.Second, nothing) == nil {
		t.Error("an obstacle that does nothing passed for one")
	}
	closed := netip.AddrPortFrom(topo.ControlPlane.Addr4, 8092)
	if CutOff([]Probe{{topo.Node, closed}}, time.Second, nothing) == nil {
		t.Error("a destination that was never reachable passed for one that is cut off")
	}
}

// An overlap leaves pods without a way back; masquerading gives them one.
func TestOverlap(t *testing.T) {
	plan := DefaultPlan()
	plan.Inside = []netip.Prefix{plan.Routed4}
	kas := netip.AddrPortFrom(KAS4, 6443)
	topo := New(t, Spec{RoutedPods: 1, Plan: &plan})
	serve(t, topo.ControlPlane, kas)
	if (Probe{topo.RoutedPods[0], kas}).Reach(300*time.Millisecond) == nil {
		t.Error("a pod reaches the control plane from an address that the control plane has itself")
	}
	topo = New(t, Spec{RoutedPods: 1, Plan: &plan, Masquerade: true})
	serve(t, topo.ControlPlane, kas)
	if peer, _ := ask(t, topo.RoutedPods[0], kas); peer != topo.Node.Addr4.String() {
		t.Errorf("seen as %s, want the node's %s", peer, topo.Node.Addr4)
	}
}

func TestCloseLeavesNothing(t *testing.T) {
	Require(t)
	topo, err := Build(Spec{RoutedPods: 1})
	if err != nil {
		t.Fatal(err)
	}
	sleeper := topo.Node.Command("sleep", "1000").Cgroup("sleeper")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	cgroup := sleeper.CgroupPath()
	if err := topo.Close(); err != nil {
		t.Fatal(err)
	}
	if sleeper.ProcessState == nil {
		t.Error("the process lives on")
	}
	if left, _ := filepath.Glob(netnsDir + "/" + topo.Name + "-*"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	if err := topo.Node.Command("true").Start(); err == nil {
		t.Error("a closed lab starts processes")
	}
	if _, err := os.Stat(filepath.Dir(cgroup)); cgroup != "" && err == nil {
		t.Errorf("left: %s", filepath.Dir(cgroup))
	}
}

// What a killed process leaves is swept by the next one; what lives stays.
func TestSweep(t *testing.T) {
	topo := New(t, Spec{})
	if os.Getenv("KWLAB_TEST_DIE") != "" {
		fmt.Println("lab " + topo.Name)
		os.Exit(3) // as if killed: no cleanup
	}
	dying := topo.Node.Command(os.Args[0], "-test.run=^TestSweep$")
	dying.Env = append(os.Environ(), "KWLAB_TEST_DIE=1")
	var out strings.Builder
	dying.Stdout = &out
	_ = dying.Run()
	_, name, ok := strings.Cut(out.String(), "lab ")
	if !ok {
		t.Fatalf("the process that was to die said %q", out.String())
	}
	name, _, _ = strings.Cut(name, "\n")
	if left, _ := filepath.Glob(netnsDir + "/" + name + "-*"); len(left) == 0 {
		t.Fatal("the process that died left nothing to sweep")
	}
	if err := Sweep(); err != nil {
		t.Fatal(err)
	}
	if left, _ := filepath.Glob(netnsDir + "/" + name + "-*"); len(left) > 0 {
		t.Errorf("not swept: %v", left)
	}
	if _, err := os.Stat(topo.Node.Path()); err != nil {
		t.Errorf("a living lab was swept: %v", err)
	}
}

// Do must never leave the machine's own namespace in /proc/self.
func TestDoKeepsTheProcessWhereItIs(t *testing.T) {
	topo := New(t, Spec{})
	before, _ := os.Readlink("/proc/self/ns/net")
	for range 20 {
		_ = topo.Node.Do(func() error {
			inside, _ := os.Readlink("/proc/thread-self/ns/net")
			if inside == before {
				t.Error("Do runs outside of the namespace")
			}
			return nil
		})
	}
	if after, _ := os.Readlink("/proc/self/ns/net"); after != before {
		t.Error("the process moved to another namespace")
	}
}
