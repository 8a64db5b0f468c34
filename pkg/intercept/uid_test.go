package intercept

import (
	"net"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"
)

func TestUIDs(t *testing.T) {
	const user = 4242
	backToBase(t)
	u, err := NewUIDs()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(u) })
	for _, at := range loopback() {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
		if err != nil {
			t.Fatal(err)
		}
		defer shut(l)
		dst := unmapped(l.Addr())
		c := dialTo(t, dst)
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		// A socket's owner is whoever made it, or was given it.
		if cerr := raw.Control(func(fd uintptr) { err = unix.Fchown(int(fd), user, -1) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		src := unmapped(c.LocalAddr())
		if uid, known := u.Of(src, dst); uid != user || !known {
			t.Errorf("%s: uid %d, %v, want %d", dst, uid, known, user)
		}
		nobody := netip.AddrPortFrom(at, 1)
		for _, other := range []netip.AddrPort{nobody, {}} {
			if uid, known := u.Of(other, dst); known {
				t.Errorf("%s from %s: uid %d", dst, other, uid)
			}
		}
		// Here the kernel finds a socket: the listener.
		if uid, known := u.Of(dst, nobody); known {
			t.Errorf("the listener is taken for a client: uid %d", uid)
		}
		shut(c)
		if uid, known := u.Of(src, dst); known {
			t.Errorf("%s after close: uid %d", dst, uid)
		}
	}
}

// The client's user is found although connection tracking knows nothing.
func TestForwardFindsTheUser(t *testing.T) {
	u, err := NewUIDs()
	if err != nil {
		t.Fatal(err)
	}
	defer shut(u)
	f := NewForwarder(ForwardConfig{UIDs: u, Gates: NewGates(1, nil)})
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client := dialTo(t, unmapped(l.Addr()))
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	taken := Taken{Conn: c.(*net.TCPConn), Target: "kas", Peer: unmapped(client.LocalAddr()), Local: unmapped(l.Addr()), FromHost: true}
	if got, err := f.describe(taken); err != nil || !got.UIDKnown || got.Pod {
		t.Errorf("host client: %+v, %v", got, err)
	}
	taken.FromHost = false // its address says nothing about this host's users
	if got, err := f.describe(taken); err != nil || got.UIDKnown || !got.Pod {
		t.Errorf("pod: %+v, %v", got, err)
	}
}
