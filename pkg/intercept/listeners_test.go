package intercept

import (
	"bufio"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
)

func TestListenersOnePortPerTargetAndFamily(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	set := func(names ...string) map[string]rules.Ports {
		t.Helper()
		var want []rules.Target
		for _, n := range names {
			want = append(want, target(n))
		}
		ports, err := r.listeners.Set(t.Context(), want)
		if err != nil {
			t.Fatal(err)
		}
		return ports
	}
	ports := set("kas", "other")
	if ports["kas"] != r.ports {
		t.Errorf("kas moved from %v to %v: open listeners must stay", r.ports, ports["kas"])
	}
	kas, other := ports["kas"], ports["other"]
	if kas.Host4 == 0 || kas.Host6 == 0 || kas.Pod4 != 0 || kas.Pod6 != 0 || other.Host4 == kas.Host4 {
		t.Errorf("ports %+v and %+v", kas, other)
	}
	for _, at := range append(Placed(loopback(), kas), Placed(loopback(), other)...) {
		wantEcho(t, dialTo(t, at))
	}

	set("kas")
	wantEcho(t, dialTo(t, Placed(loopback(), other)[0])) // still diverted to
	r.listeners.Trim()
	for _, at := range Placed(loopback(), other) {
		if c, err := net.Dial("tcp", at.String()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("%s after Trim: %v, %v", at, c, err)
		}
	}
	wantEcho(t, r.dial(t))
	if info := multipath(t, r); info {
		t.Error("the listener takes MPTCP")
	}
}

func multipath(t *testing.T, r *rig) bool {
	t.Helper()
	for _, l := range r.listeners.open {
		raw, err := l.tcp.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		proto := 0
		if err := raw.Control(func(fd uintptr) { proto, err = syscall.GetsockoptInt(int(fd), syscall.SOL_SOCKET, 0x26) }); err != nil || proto == 0 {
			t.Fatal(proto, err)
		}
		if proto != syscall.IPPROTO_TCP {
			return true
		}
	}
	return false
}

func TestListenersFamilies(t *testing.T) {
	n4, n6 := netip.MustParseAddr("169.254.77.1"), netip.MustParseAddr("fd00::1")
	all := Placement(rules.Clients{Host: true, Pods: true}, n4, n6)
	if len(all) != 4 || all[2] != n4 || all[3] != n6 {
		t.Errorf("host and pods: %v", all)
	}
	if at := Placement(rules.Clients{Pods: true}, n4, netip.Addr{}); len(at) != 3 {
		t.Errorf("pods on a node without a v6 address: %v", at)
	}
	if at := Placement(rules.Clients{Host: true}, n4, n6); len(at) != 2 {
		t.Errorf("host alone: %v", at)
	}
}

func TestListenersFailAsAWhole(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	taken, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	fixed := NewListeners(ListenersConfig{Addresses: loopback(), Fixed: true, Server: r.server})
	defer fixed.Close()
	port := uint16(taken.Addr().(*net.TCPAddr).Port)
	// At 127.0.0.1 the port is free, at ::1 it is not.
	if _, err := fixed.Set(t.Context(), []rules.Target{{Name: "a", Listen: port}}); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("Set: %v, want EADDRINUSE", err)
	}
	at := netip.AddrPortFrom(loopback()[0], port)
	if _, err := net.Dial("tcp", at.String()); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%s after a Set that failed: %v", at, err)
	}
}

func TestListenersRefuseAndOpenAgain(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	free, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := unmapped(free.Addr())
	free.Close()
	ls := NewListeners(ListenersConfig{Addresses: loopback()[:1], Fixed: true, Server: r.server})
	defer ls.Close()
	want := []rules.Target{{Name: "kas", Listen: at.Port()}}
	refused := func() {
		t.Helper()
		if _, err := net.Dial("tcp", at.String()); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("while refused: %v", err)
		}
	}
	for range 2 { // Set is idempotent, refused or not
		if ports, err := ls.Set(t.Context(), want); err != nil || ports["kas"].Host4 != at.Port() {
			t.Fatal(ports, err)
		}
	}
	wantEcho(t, dialTo(t, at))
	if err := ls.Refuse(t.Context(), []string{"kas"}); err != nil {
		t.Fatal(err)
	}
	refused()
	if ports, err := ls.Set(t.Context(), want); err != nil || ports["kas"].Host4 != at.Port() {
		t.Fatal(ports, err)
	}
	refused()
	if err := ls.Refuse(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	wantEcho(t, dialTo(t, at))
}

func TestCase_B84_PortClashNamesOwner(t *testing.T) {
	for _, at := range []string{"127.0.0.1:0", "[::1]:0", "0.0.0.0:0"} {
		t.Run(at, func(t *testing.T) {
			other := exec.Command(os.Args[0])
			other.Env = append(os.Environ(), listenEnv+"="+at)
			hold, err := other.StdinPipe()
			if err != nil {
				t.Fatal(err)
			}
			out, err := other.StdoutPipe()
			if err != nil {
				t.Fatal(err)
			}
			if err := other.Start(); err != nil {
				t.Fatal(err)
			}
			defer func() { hold.Close(); _ = other.Wait() }()
			line, err := bufio.NewReader(out).ReadString('\n')
			if err != nil {
				t.Fatal(err)
			}
			taken := netip.MustParseAddrPort(strings.TrimSpace(line))
			if taken.Addr().IsUnspecified() {
				taken = netip.AddrPortFrom(loopback()[0], taken.Port())
			}

			r := newRig(t, ServerConfig{Handle: echo})
			ls := NewListeners(ListenersConfig{Addresses: []netip.Addr{taken.Addr()}, Fixed: true, Server: r.server})
			defer ls.Close()
			_, err = ls.Set(t.Context(), []rules.Target{{Name: "kas", Listen: taken.Port()}})
			comm, rerr := os.ReadFile("/proc/" + strconv.Itoa(other.Process.Pid) + "/comm")
			if rerr != nil {
				t.Fatal(rerr)
			}
			want := "listen tcp " + taken.String() + ": in use by pid " + strconv.Itoa(other.Process.Pid) + " (" + strings.TrimSpace(string(comm)) + ")"
			if err == nil || !strings.Contains(err.Error(), want) {
				t.Errorf("error %v, want it to say %q", err, want)
			}

			_, err = net.Listen("tcp", ":"+strconv.Itoa(int(taken.Port())))
			if err = ExplainListen(err); err == nil || !strings.Contains(err.Error(), "pid "+strconv.Itoa(other.Process.Pid)) || !errors.Is(err, syscall.EADDRINUSE) {
				t.Errorf("on every address: %v, want the owner", err)
			}

			hold.Close()
			_ = other.Wait()
			ports, err := ls.Set(t.Context(), []rules.Target{{Name: "kas", Listen: taken.Port()}})
			if err != nil {
				t.Fatalf("the port is free again: %v", err)
			}
			wantEcho(t, dialTo(t, Placed([]netip.Addr{taken.Addr()}, ports["kas"])[0]))
		})
	}
}
