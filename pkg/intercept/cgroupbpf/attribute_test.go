package cgroupbpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

func inodeOf(t *testing.T, dir string) uint64 {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(dir, &st); err != nil {
		t.Fatal(err)
	}
	return st.Ino
}

// Who connected is known by cgroup, user and process, with the address that was
// dialled; and once only: it was given back.
func TestAttribute(t *testing.T) {
	t.Parallel()
	p := newInProcess(t, netns.Spec{RoutedPods: 1})
	for _, c := range []struct {
		from *netns.Host
		l    net.Listener
		side intercept.Side
	}{{p.Node, p.host["other"], intercept.HostSide}, {p.RoutedPods[0], p.pods["other"], intercept.PodSide}} {
		conn, err := c.from.Dial(context.Background(), "tcp", atPort(targetPorts["other"]).String())
		if err != nil {
			t.Fatal(err)
		}
		a, known, taken := p.accept(t, c.l, c.side)
		conn.Close()
		if !known || a.CgroupID != inodeOf(t, c.from.CgroupPath()) || !a.UIDKnown || a.UID != uint32(os.Getuid()) ||
			a.PID == 0 || a.Command == "" || a.Original != atPort(targetPorts["other"]) {
			t.Errorf("%s: %+v, known %t", c.side, a, known)
		}
		if _, known := p.mode.Attribute(taken); known {
			t.Errorf("%s: it is known a second time", c.side)
		}
	}
}

// A process that has the victim's address and port in a network namespace of its
// own, as any user may make one, cannot change where the victim's connection goes
// or whose it is said to be: at the worst nobody knows. Nor can a flood of pods'
// connects push the host's out.
func TestCase_B97_PodCannotForgeOrFlush(t *testing.T) {
	t.Parallel()
	p := newInProcess(t, netns.Spec{RoutedPods: 2})
	victim, attacker := p.RoutedPods[0], p.RoutedPods[1]
	// The attacker's own loopback answers in the node's stead.
	for _, a := range []netip.Addr{victim.Addr4, testNode4} {
		if err := attacker.AddAddr("lo", netip.PrefixFrom(a, 32)); err != nil {
			t.Fatal(err)
		}
	}
	const port = 40404
	connect := func(from *netns.Host, to string) error {
		d := &net.Dialer{LocalAddr: &net.TCPAddr{IP: victim.Addr4.AsSlice(), Port: port}}
		c, err := from.DialWith(context.Background(), d, "tcp", to)
		if err != nil {
			return err
		}
		// No port stays in TIME_WAIT.
		return errors.Join(c.(*net.TCPConn).SetLinger(0), c.Close())
	}
	other, kas := atPort(targetPorts["other"]).String(), atPort(targetPorts["kas"]).String()
	if err := connect(victim, kas); err != nil { // the twin: nobody interferes
		t.Fatal(err)
	}
	if a, known, _ := p.accept(t, p.pods["kas"], intercept.PodSide); !known || a.CgroupID != inodeOf(t, victim.CgroupPath()) {
		t.Errorf("without an attacker: %+v, known %t", a, known)
	}
	forge := func(to string) {
		if err := connect(attacker, to); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Errorf("the attacker's connect: %v; want ECONNREFUSED from its own loopback", err)
		}
	}
	for _, c := range []struct {
		name          string
		to            string
		before, after bool
		known         bool
	}{
		{"before", kas, true, false, false}, {"after", kas, false, true, false}, {"before and after", kas, true, true, false},
		{"to another target", other, true, true, true},
	} {
		if c.before {
			forge(c.to)
		}
		if err := connect(victim, kas); err != nil {
			t.Fatal(err)
		}
		if c.after {
			forge(c.to)
		}
		a, known, taken := p.accept(t, p.pods["kas"], intercept.PodSide) // and not at other's
		if taken.Peer != netip.AddrPortFrom(victim.Addr4, port) {
			t.Errorf("%s: accepted %s", c.name, taken.Peer)
		}
		if known != c.known || known && a.CgroupID != inodeOf(t, victim.CgroupPath()) {
			t.Errorf("%s: the victim's connection is said to be that of %+v, known %t", c.name, a, known)
		}
	}
	p.flood(t, attacker, victim.Addr4)
}

// floodFrom is set by the tests that have a client of system calls.
var floodFrom func(from *netns.Host, source netip.Addr, to netip.AddrPort, connects int) error

// SetFlood hands over that client.
func SetFlood(f func(from *netns.Host, source netip.Addr, to netip.AddrPort, connects int) error) {
	floodFrom = f
}

// flood makes more connects of pods than their map holds, between a host's
// connect and its accept.
func (p *inProcess) flood(t *testing.T, attacker *netns.Host, source netip.Addr) {
	t.Helper()
	conn, err := p.Node.Dial(context.Background(), "tcp", atPort(targetPorts["kas"]).String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	connects := 50_000
	if os.Getenv("FULL") == "1" {
		connects = 400_000
	}
	if err := floodFrom(attacker, source, atPort(targetPorts["other"]), connects); err != nil {
		t.Fatal(err)
	}
	a, known, _ := p.accept(t, p.host["kas"], intercept.HostSide)
	if !known || a.CgroupID != inodeOf(t, p.Node.CgroupPath()) {
		t.Errorf("after %d connects of a pod the host's process is %+v, known %t", connects, a, known)
	}
}
