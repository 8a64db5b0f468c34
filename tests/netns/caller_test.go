package netns

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// forbid attaches a hook to dir by which every connect over IPv4 fails with
// EPERM.
func forbid(t *testing.T, dir string) {
	t.Helper()
	if dir == "" {
		t.Fatal("no cgroup v2 is mounted")
	}
	prog, err := ebpf.NewProgram(&ebpf.ProgramSpec{Name: "lab_forbid", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect,
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 0), asm.Return()}, License: "GPL"})
	if err != nil {
		t.Fatal(err)
	}
	defer prog.Close()
	l, err := link.AttachCgroup(link.CgroupOptions{Path: dir, Attach: ebpf.AttachCGroupInet4Connect, Program: prog})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
}

// A hook on the node's cgroup sees what the node and its pods dial, and nobody
// else's: not another host's, and not that of the next lab's node.
func TestConnectHooksSeeTheNode(t *testing.T) {
	topo, other := everything(t), everything(t)
	kas := netip.AddrPortFrom(KAS4, 6443)
	for _, l := range []*Topology{topo, other} {
		serve(t, l.ControlPlane, kas)
		serve(t, l.ControlPlane, netip.AddrPortFrom(l.ControlPlane.Addr4, 6443))
	}
	forbid(t, topo.NodeCgroup())
	if all, err := AttachedTo(topo.NodeCgroup()); err != nil || len(all) != 1 || all[0].Hook != "connect4" || all[0].Program == 0 || all[0].Link == 0 {
		t.Errorf("attached: %+v, %v", all, err)
	}
	if all, err := AttachedTo(topo.Node.CgroupPath()); err != nil || len(all) > 0 {
		t.Errorf("attached below it: %+v, %v", all, err)
	}
	for _, h := range []*Host{topo.Node, topo.RoutedPods[0], topo.BridgedPods[0]} {
		if err := (Probe{h, kas}).Reach(time.Second); !errors.Is(err, unix.EPERM) {
			t.Errorf("%s is not seen by the hook: %v", h.Label, err)
		}
		if _, err := h.Run("bash", "-c", "exec 3<>/dev/tcp/"+kas.Addr().String()+"/6443"); err == nil {
			t.Errorf("a command of %s is not seen by the hook", h.Label)
		}
	}
	for _, p := range []Probe{{topo.Neighbour, netip.AddrPortFrom(topo.ControlPlane.Addr4, 6443)}, {topo.ControlPlane, kas},
		{other.Node, kas}, {other.RoutedPods[0], kas}, {other.BridgedPods[0], kas}} {
		if err := p.Reach(time.Second); err != nil {
			t.Errorf("%s is none of the node's: %v", p.From.Label, err)
		}
	}
}

// The cgroups are named as systemd and containerd name them, and those who dial
// are in them.
func TestCgroupsLookReal(t *testing.T) {
	topo := everything(t)
	pod := topo.RoutedPods[0]
	uid := strings.ReplaceAll(pod.PodUID, "-", "_")
	for h, want := range map[*Host]string{
		topo.Node:      "/node/system.slice/kubelet.service",
		topo.Neighbour: "/neighbour/system.slice/kubelet.service",
		pod: "/node/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + uid +
			".slice/cri-containerd-" + pod.ContainerID + ".scope",
	} {
		if got := strings.TrimPrefix(h.CgroupPath(), topo.cgroup); got != want {
			t.Errorf("%s: cgroup %s, want %s", h.Label, got, want)
		}
		calls, err := h.caller()
		if err != nil {
			t.Fatal(err)
		}
		text, err := os.ReadFile("/proc/" + strconv.Itoa(calls.cmd.Process.Pid) + "/cgroup")
		if err != nil || !strings.Contains(string(text), "0::/"+topo.Name+want+"\n") {
			t.Errorf("%s: the one who dials is in %s, %v", h.Label, text, err)
		}
	}
	if topo.BridgedPods[0].PodUID == pod.PodUID {
		t.Error("two pods have the same uid")
	}
}

// DialWith means by a Dialer what the Dialer means.
func TestDialWith(t *testing.T) {
	topo := everything(t)
	kas := netip.AddrPortFrom(KAS4, 6443)
	serve(t, topo.ControlPlane, kas)
	dial := func(d *net.Dialer, to string) (net.Conn, error) { return topo.Node.DialWith(t.Context(), d, "tcp", to) }

	if _, err := dial(&net.Dialer{}, "172.30.0.10:1"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("a closed port: %v", err)
	}
	var n net.Error
	if _, err := dial(&net.Dialer{Timeout: 50 * time.Millisecond}, "192.168.77.200:1"); !errors.As(err, &n) || !n.Timeout() {
		t.Errorf("nobody there: %v, want a time-out", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	time.AfterFunc(50*time.Millisecond, cancel)
	if _, err := topo.Node.Dial(ctx, "tcp", "192.168.77.200:1"); !errors.Is(err, context.Canceled) {
		t.Errorf("given up: %v", err)
	}
	if _, err := dial(&net.Dialer{}, "localhost:1"); err == nil {
		t.Error("a name was resolved")
	}
	marked := 0
	d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: topo.Node.Addr4.AsSlice(), Port: 23456},
		Control: func(network, address string, c syscall.RawConn) error {
			if network != "tcp4" || address != kas.String() {
				t.Errorf("Control gets %s %s", network, address)
			}
			return c.Control(func(fd uintptr) { _ = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, 0x40) })
		}}
	c, err := dial(d, kas.String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	_ = raw.Control(func(fd uintptr) { marked, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) })
	if c.LocalAddr().String() != "192.168.77.10:23456" || c.RemoteAddr().String() != kas.String() || marked != 0x40 {
		t.Errorf("%s to %s with mark %#x, %v", c.LocalAddr(), c.RemoteAddr(), marked, err)
	}
}

// What is pinned in the lab's bpffs is there for the next process, seen from
// outside, and not where the machine has its own.
func TestBPFFS(t *testing.T) {
	topo := New(t, Spec{})
	at, err := topo.BPFFS()
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{"mkdir /sys/fs/bpf/kasway", "test -d /sys/fs/bpf/kasway"} {
		cmd := topo.Node.Command("sh", "-c", line).BPFFS()
		if err := cmd.Run(); err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
	if _, err := os.Stat(at + "/kasway"); err != nil {
		t.Errorf("seen from outside: %v", err)
	}
	if _, err := os.Stat(bpffsPoint + "/kasway"); err == nil {
		t.Error("it is the machine's own bpffs")
	}
	if other, err := New(t, Spec{}).BPFFS(); err != nil {
		t.Error(err)
	} else if _, err := os.Stat(other + "/kasway"); err == nil {
		t.Error("another lab sees it")
	}
}

// BenchmarkDial is what a storm of one worker can do at most.
func BenchmarkDial(b *testing.B) {
	topo, err := Build(Spec{})
	if err != nil {
		b.Skip(err)
	}
	defer func() { _ = topo.Close() }()
	l, err := topo.Node.Listen("tcp", "127.0.0.1:1234")
	if err != nil {
		b.Fatal(err)
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			c.Close()
		}
	}()
	defer l.Close()
	begun := time.Now()
	if _, err := topo.Node.caller(); err != nil {
		b.Fatal(err)
	}
	b.ReportMetric(float64(time.Since(begun).Milliseconds()), "ms-to-start")
	for b.Loop() {
		c, err := topo.Node.Dial(b.Context(), "tcp", "127.0.0.1:1234")
		if err != nil {
			b.Fatal(err)
		}
		_ = c.(*net.TCPConn).SetLinger(0)
		c.Close()
	}
}

// A starved process does next to nothing, and goes on afterwards.
func TestStarve(t *testing.T) {
	topo := New(t, Spec{})
	cmd := topo.Node.Command("sh", "-c", "while :; do :; done & while :; do :; done")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	used := func() (ticks int) {
		stat, err := os.ReadFile("/proc/" + strconv.Itoa(cmd.Process.Pid) + "/stat")
		if err != nil {
			t.Fatal(err)
		}
		ticks, _ = strconv.Atoi(strings.Fields(string(stat))[13])
		return ticks
	}
	runs := func(ticks int) error {
		from := used()
		return Poll(10*time.Second, func() error {
			if used() < from+ticks {
				return errors.New("it does not run")
			}
			return nil
		})
	}
	if err := runs(10); err != nil {
		t.Fatal(err)
	}
	release, err := cmd.Starve()
	if err != nil {
		t.Fatal(err)
	}
	from := used()
	<-time.After(time.Second) // there is nothing to wait for
	if ticks := used() - from; ticks > 5 {
		t.Errorf("starved for a second it ran for %d hundredths of one", ticks)
	}
	if err := release(); err != nil {
		t.Fatal(err)
	}
	if err := runs(10); err != nil {
		t.Errorf("after its release: %v", err)
	}
}
