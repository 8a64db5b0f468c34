package intercept

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"runtime"
	"slices"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestOwnSocketsAreMarkedBeforeConnect(t *testing.T) {
	o := NewOwnSockets(0x4f, 0x40)
	if err := o.Check(); err != nil {
		t.Fatal(err)
	}
	r := newRig(t, ServerConfig{Handle: echo})
	for _, at := range Placed(loopback(), r.ports) {
		c, err := o.DialContext(t.Context(), "tcp", at.String())
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		tcp, ok := c.(*net.TCPConn)
		if !ok {
			t.Fatalf("it is a %T: gRPC sets no user timeout on that", c)
		}
		raw, err := tcp.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		mark := 0
		if cerr := raw.Control(func(fd uintptr) { mark, err = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		if mark != 0x40 {
			t.Errorf("mark %#x, want only the bits of the mask, 0x40", mark)
		}
		wantEcho(t, c)
	}
}

func TestOwnSocketsWithoutPrivilege(t *testing.T) {
	got := make(chan error)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends without its capabilities
		hdr := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
		var none [2]unix.CapUserData
		if err := unix.Capset(&hdr, &none[0]); err != nil {
			got <- err
			return
		}
		o := NewOwnSockets(0x40, 0x40)
		err := o.Check()
		if _, derr := o.DialContext(context.Background(), "tcp", "127.0.0.1:1"); !errors.Is(derr, ErrPrivilege) {
			err = errors.Join(errors.New("dialled without a mark"), derr)
		}
		got <- err
	}()
	if err := <-got; !errors.Is(err, ErrPrivilege) {
		t.Errorf("%v, want ErrPrivilege", err)
	}
}

func TestOwnSocketsForgetTheClosed(t *testing.T) {
	o := NewOwnSockets(0x40, 0x40)
	r := newRig(t, ServerConfig{Handle: echo})
	at := netip.AddrPortFrom(loopback()[0], r.ports.Host4)
	c, err := o.DialContext(t.Context(), "tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	peer := unmapped(c.LocalAddr())
	if !o.Has(peer) {
		t.Error("an open connection is not known")
	}
	if o.Has(netip.AddrPortFrom(netip.IPv6Loopback(), peer.Port())) {
		t.Error("the same port of the other family is taken for ours")
	}
	c.Close()
	if o.Has(peer) {
		t.Error("a closed connection's port is still ours: the next client that gets it would be refused")
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	if _, err := o.DialContext(t.Context(), "tcp", l.Addr().String()); err == nil {
		t.Fatal("a closed port answers")
	}
	if len(o.ports) != 0 {
		t.Errorf("left over: %v", o.ports)
	}
}

// The server's address is the one that is diverted, and the mark does not help.
func TestCase_B44_OwnConnectionIsNotTaken(t *testing.T) {
	own := NewOwnSockets(0x40, 0x40)
	peers, err := NewPeers(PeersConfig{Own: own})
	if err != nil {
		t.Fatal(err)
	}
	defer peers.Close()
	m, v := metrics(t)
	r := newRig(t, ServerConfig{Handle: echo, Admit: peers.Admit, Metrics: m})
	const n = 50 // the listener is faster than the dialler's return, now and then
	for i := range n {
		at := Placed(loopback(), r.ports)[i%2]
		c, err := own.DialContext(t.Context(), "tcp", at.String())
		if err != nil {
			// Reset before connect was seen to have succeeded.
			if !errors.Is(err, unix.ECONNRESET) {
				t.Fatal(err)
			}
			continue
		}
		wantReset(t, c)
		c.Close()
		if t.Failed() {
			return // the others would wait as long
		}
	}
	if got := v.of("refused_total own"); got != n {
		t.Errorf("%v of %d own connections counted", got, n)
	}
	if v.of("connections") != 0 {
		t.Errorf("%v of our own were taken", v.of("connections"))
	}
	wantEcho(t, r.dial(t)) // anybody else of this host
}

// Of several addresses that are tried at once, one becomes the connection.
func TestOwnSocketsForgetTheLosers(t *testing.T) {
	o := NewOwnSockets(0x40, 0x40)
	a := &attempts{own: o}
	attempt := func() {
		t.Helper()
		l, err := (&net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
			return a.control(t.Context(), "tcp", "", c)
		}}).ListenPacket(t.Context(), "udp4", "")
		if err == nil {
			shut(l)
		}
	}
	attempt()
	attempt()
	if len(o.ports) != 2 {
		t.Fatalf("%d attempts known, want 2", len(o.ports))
	}
	r := newRig(t, ServerConfig{Handle: echo})
	c := r.dial(t)
	o.remember(a.ports[0], c)
	a.end()
	attempt() // came too late
	if _, kept := o.ports[a.ports[0]]; !kept || len(o.ports) != 1 {
		t.Errorf("known are %v, want the connection alone", o.ports)
	}
}

// The watcher hears of every socket that is open, and of each one to come before
// it connects, by the number that the kernel knows it by; never after stop.
func TestOwnSocketsWatch(t *testing.T) {
	o := NewOwnSockets(0x40, 0x40)
	r := newRig(t, ServerConfig{Handle: echo})
	at := netip.AddrPortFrom(loopback()[0], r.ports.Host4).String()
	dial := func() (cookie uint64) {
		t.Helper()
		c, err := o.DialContext(t.Context(), "tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { shut(c) })
		raw, err := c.(*net.TCPConn).SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if cerr := raw.Control(func(fd uintptr) { cookie, err = unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		return cookie
	}
	var heard []uint64
	want := []uint64{dial()}
	stop := o.Watch(func(cookie uint64) { heard = append(heard, cookie) })
	want = append(want, dial())
	stop()
	dial()
	if !slices.Equal(heard, want) {
		t.Errorf("heard of %v, want %v", heard, want)
	}
	// One that is refused has been heard of: it has connected.
	before := len(heard)
	defer o.Watch(func(cookie uint64) { heard = append(heard, cookie) })()
	known := len(heard) - before
	if _, err := o.DialContext(t.Context(), "tcp", "127.0.0.1:1"); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("port 1: %v", err)
	}
	if known != 3 || len(heard) != before+4 {
		t.Errorf("a new watcher heard of %d open sockets and %d in all, want 3 and 4", known, len(heard)-before)
	}
}
