package intercept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Mark is set on our own sockets, and exempts them from diversion. It avoids
// the bits of kube-proxy (0x4000, 0x8000), Cilium (0x0f00), Calico
// (0xffff0000), the AWS CNI (0x80) and Istio (0x539).
const Mark = 0x40

// OwnSockets makes the agent's own connections, which must never be diverted:
// each carries the mark that every mode exempts, set before connect. Should one
// come back to us all the same, Has tells it by its port. It is safe for
// concurrent use.
type OwnSockets struct {
	mark int

	mu    sync.Mutex
	ports map[ownPort]*net.TCPConn // nil: still connecting
	watch func(cookie uint64)      // nil: nobody asks
}

// ownPort is a port of this host; the two families have their own.
type ownPort struct {
	port uint16
	ip6  bool
}

func portKey(a netip.AddrPort) ownPort { return ownPort{a.Port(), a.Addr().Is6()} }

// NewOwnSockets sets the bits of mark that are in mask on each socket.
func NewOwnSockets(mark, mask uint32) *OwnSockets {
	return &OwnSockets{mark: int(mark & mask), ports: map[ownPort]*net.TCPConn{}}
}

// Check reports why this process cannot mark its sockets, in which case it
// would divert its own connections and must not start.
func (o *OwnSockets) Check() error {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return fmt.Errorf("making a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	return o.set(fd)
}

func (o *OwnSockets) set(fd int) error {
	err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, o.mark)
	if errors.Is(err, os.ErrPermission) {
		return fmt.Errorf("%w: setting SO_MARK %#x on a socket: %w: run as root, or with CAP_NET_ADMIN", ErrPrivilege, o.mark, err)
	}
	if err != nil {
		return fmt.Errorf("setting SO_MARK %#x on a socket: %w", o.mark, err)
	}
	return nil
}

// Control marks a socket; it is for net.Dialer.Control.
func (o *OwnSockets) Control(_, _ string, c syscall.RawConn) error {
	var err error
	if cerr := c.Control(func(fd uintptr) { err = o.set(int(fd)) }); cerr != nil {
		return cerr
	}
	return err
}

// DialContext connects a marked TCP socket of ours and remembers it until it is
// closed. It returns the *net.TCPConn itself: gRPC sets its timeouts only on
// that type.
func (o *OwnSockets) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	attempts := &attempts{own: o}
	d := net.Dialer{ControlContext: attempts.control}
	d.SetMultipathTCP(false)
	defer attempts.end()
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		return nil, errors.Join(fmt.Errorf("dial %s: only TCP is dialled here", network), c.Close())
	}
	o.remember(portKey(unmapped(tcp.LocalAddr())), tcp)
	return tcp, nil
}

// attempts are the sockets of one dial, of which at most one stays: the others
// raced it to another address.
type attempts struct {
	own   *OwnSockets
	mu    sync.Mutex
	ended bool
	ports []ownPort
}

func (a *attempts) control(_ context.Context, network, address string, c syscall.RawConn) error {
	if err := a.own.Control(network, address, c); err != nil {
		return err
	}
	a.own.announce(c)
	var port ownPort
	if err := c.Control(func(fd uintptr) { port = bindEarly(int(fd)) }); err != nil {
		return err
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	// A loser may come this far when the race is over.
	if port.port != 0 && !a.ended {
		a.ports = append(a.ports, port)
		a.own.remember(port, nil)
	}
	return nil
}

// end forgets the attempts that did not become a connection.
func (a *attempts) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.ended = true
	for _, port := range a.ports {
		a.own.forgetAttempt(port)
	}
}

// bindEarly gives the socket its port before it connects: otherwise our own
// listener could accept the connection before anybody knows whose it is. No
// other socket of this host can get a port bound like this. It returns port 0 when
// no port is free; connect may still find one.
func bindEarly(fd int) ownPort {
	domain, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_DOMAIN)
	if err != nil {
		return ownPort{}
	}
	var any unix.Sockaddr = &unix.SockaddrInet4{}
	if domain == unix.AF_INET6 {
		any = &unix.SockaddrInet6{}
	}
	if unix.Bind(fd, any) != nil {
		return ownPort{}
	}
	switch sa, _ := unix.Getsockname(fd); sa := sa.(type) {
	case *unix.SockaddrInet4:
		return ownPort{uint16(sa.Port), false}
	case *unix.SockaddrInet6:
		return ownPort{uint16(sa.Port), true}
	}
	return ownPort{}
}

// Has reports whether peer, an address of this host, is one of our sockets.
func (o *OwnSockets) Has(peer netip.AddrPort) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	key := portKey(peer)
	c, ok := o.ports[key]
	if ok && !alive(c) {
		delete(o.ports, key)
		return false
	}
	return ok
}

// Watch calls f with the cookie (SO_COOKIE) of every socket that is open, and of
// each one to come before it connects, until stop is called. There is one watcher
// at a time: a second one takes the place of the first. f must not block, nor use o.
func (o *OwnSockets) Watch(f func(cookie uint64)) (stop func()) {
	o.mu.Lock()
	o.watch = f
	var open []*net.TCPConn
	for _, c := range o.ports {
		if c != nil {
			open = append(open, c)
		}
	}
	o.mu.Unlock()
	for _, c := range open {
		if raw, err := c.SyscallConn(); err == nil {
			o.announce(raw)
		}
	}
	return func() {
		o.mu.Lock()
		defer o.mu.Unlock()
		o.watch = nil
	}
}

// announce tells the watcher of a socket; one that is closed has no cookie.
func (o *OwnSockets) announce(c syscall.RawConn) {
	_ = c.Control(func(fd uintptr) {
		cookie, err := unix.GetsockoptUint64(int(fd), unix.SOL_SOCKET, unix.SO_COOKIE)
		if err != nil {
			return
		}
		o.mu.Lock()
		defer o.mu.Unlock() // once stop has returned, the watcher is not called
		if o.watch != nil {
			o.watch(cookie)
		}
	})
}

// Remotes are the addresses that our open connections lead to.
func (o *OwnSockets) Remotes() (out []netip.Addr) {
	o.mu.Lock()
	defer o.mu.Unlock()
	for _, c := range o.ports {
		if c != nil && alive(c) {
			out = append(out, unmapped(c.RemoteAddr()).Addr())
		}
	}
	return out
}

func (o *OwnSockets) remember(port ownPort, c *net.TCPConn) {
	o.mu.Lock()
	defer o.mu.Unlock()
	// Closed ones are dropped here, so that the map stays as small as the
	// number of links.
	for p, c := range o.ports {
		if !alive(c) {
			delete(o.ports, p)
		}
	}
	o.ports[port] = c
}

// forgetAttempt forgets port unless it has become a connection.
func (o *OwnSockets) forgetAttempt(port ownPort) {
	o.mu.Lock()
	defer o.mu.Unlock()
	if c, ok := o.ports[port]; ok && c == nil {
		delete(o.ports, port)
	}
}

// alive reports whether c is still open here, or still connecting (nil).
func alive(c *net.TCPConn) bool {
	if c == nil {
		return true
	}
	raw, err := c.SyscallConn()
	return err == nil && raw.Control(func(uintptr) {}) == nil
}
