package intercept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// ListenersConfig says where listeners are placed.
type ListenersConfig struct {
	// Addresses get one listener per target each: see Placement, or the bind
	// addresses of mode listen. Loopback addresses are the host's side, all
	// others the pods'.
	Addresses []netip.Addr
	// Fixed puts a target's listener on its Listen port where it has one, as
	// mode listen does; otherwise the kernel chooses.
	Fixed bool
	// Transparent lets the kernel give a listener connections to any address, as
	// mode tproxy has it do. What an accepted socket calls its own address is then
	// the one that the client dialled.
	Transparent bool
	// Inherit returns a listener at an address that another process has handed
	// over, and gives it away, or nil; nil: there are none.
	Inherit func(netip.AddrPort) *net.TCPListener
	// Server accepts on what is opened.
	Server *Server
}

// Placement is where the listeners of all modes but listen are: the loopback
// addresses that the host has (always: the self-test goes there), and for
// diverted pods the node-local ones that are valid.
func Placement(c rules.Clients, node4, node6 netip.Addr) []netip.Addr {
	at := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	if HasIPv6() {
		at = append(at, netip.IPv6Loopback())
	}
	for _, a := range []netip.Addr{node4, node6} {
		if c.Pods && a.IsValid() {
			at = append(at, a)
		}
	}
	return at
}

// HasIPv6 reports whether this host can speak IPv6 at all: whether it has ::1.
func HasIPv6() bool {
	l, err := net.Listen("tcp6", "[::1]:0")
	if err != nil {
		return false
	}
	return l.Close() == nil
}

// Placed are the addresses at which a target with ports p is reached in mode
// listen: the one of at that each port is on.
func Placed(at []netip.Addr, p rules.Ports) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range at {
		if port := *portOf(&p, a); port != 0 {
			out = append(out, netip.AddrPortFrom(a, port))
		}
	}
	return out
}

// portOf is the field of p that a listener on addr belongs to.
func portOf(p *rules.Ports, addr netip.Addr) *uint16 {
	switch {
	case addr.IsLoopback() && addr.Is4():
		return &p.Host4
	case addr.IsLoopback():
		return &p.Host6
	case addr.Is4():
		return &p.Pod4
	default:
		return &p.Pod6
	}
}

// listener is one open listener, the accepted port of which is the target.
type listener struct {
	at     place
	side   Side
	addr   netip.AddrPort
	tcp    *net.TCPListener
	closed chan struct{}
	// release lets close end the socket: see ReleaseFirst.
	release func()
}

func (l *listener) close() {
	close(l.closed)
	l.release()
	_ = l.tcp.Close()
}

// deaf says whether the kernel has ended the socket without our doing.
func (l *listener) deaf() (deaf bool) {
	raw, err := l.tcp.SyscallConn()
	if err != nil {
		return false
	}
	_ = raw.Control(func(fd uintptr) { // fails once it is closed, which is no damage
		listens, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ACCEPTCONN)
		deaf = err == nil && listens == 0
	})
	return deaf
}

// place is what a listener is kept by: the port as asked for, 0 for any.
type place struct {
	target string
	addr   netip.AddrPort
}

// Listeners keeps one listener per target and address. It is safe for
// concurrent use.
type Listeners struct {
	cfg ListenersConfig

	mu      sync.Mutex
	open    map[place]*listener
	wanted  []place
	refused []string
	closed  bool
}

// NewListeners opens nothing yet.
func NewListeners(cfg ListenersConfig) *Listeners {
	return &Listeners{cfg: cfg, open: map[place]*listener{}}
}

// Set opens what targets need and does not have yet, in the calling thread's
// network namespace, and returns every target's ports. Listeners of targets
// that are gone stay open until Trim, so that a mode can stop diverting to
// them first. After an error nothing has changed.
func (ls *Listeners) Set(ctx context.Context, targets []rules.Target) (map[string]rules.Ports, error) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	var wanted []place
	for _, t := range targets {
		for _, a := range ls.cfg.Addresses {
			wanted = append(wanted, ls.place(t, a))
		}
	}
	if err := ls.openMissing(ctx, wanted, ls.refused); err != nil {
		return nil, err
	}
	ls.wanted = wanted
	ports := map[string]rules.Ports{}
	for _, at := range wanted {
		p, port := ports[at.target], at.addr.Port()
		if l := ls.open[at]; l != nil {
			port = l.addr.Port()
		}
		*portOf(&p, at.addr.Addr()) = port
		ports[at.target] = p
	}
	return ports, nil
}

func (ls *Listeners) place(t rules.Target, a netip.Addr) place {
	var port uint16
	if ls.cfg.Fixed {
		port = t.Listen
	}
	return place{t.Name, netip.AddrPortFrom(a, port)}
}

// Trim closes the listeners that the last Set did not name.
func (ls *Listeners) Trim() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.keep(func(p place) bool { return slices.Contains(ls.wanted, p) })
}

// Refuse closes the listeners of the named targets, so that the kernel refuses
// connects to them, and opens those again that are named no longer. It is for
// mode listen, where nothing but the listener can answer a client; its ports
// are fixed, so that a target has the same one afterwards.
func (ls *Listeners) Refuse(ctx context.Context, names []string) error {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	if err := ls.openMissing(ctx, ls.wanted, names); err != nil {
		return err
	}
	ls.refused = slices.Clone(names)
	ls.keep(func(p place) bool { return !slices.Contains(names, p.target) })
	return nil
}

// Verify tells which listeners somebody else has made deaf. The next Set or
// Refuse opens them again, at the port that they had.
func (ls *Listeners) Verify() (damage []Damage) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for at, l := range ls.open {
		if l.deaf() {
			damage = append(damage, Damage{What: "listener " + l.addr.String() + " of target " + at.target + " no longer listens", Suspects: "`ss --kill`"})
		}
	}
	slices.SortFunc(damage, func(a, b Damage) int { return strings.Compare(a.What, b.What) })
	return damage
}

// Close closes every listener. Connections already taken live on.
func (ls *Listeners) Close() {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	ls.closed = true
	ls.keep(func(place) bool { return false })
}

// openMissing opens all listeners of wanted that are not open and not refused,
// or none.
func (ls *Listeners) openMissing(ctx context.Context, wanted []place, refused []string) error {
	if ls.closed {
		return net.ErrClosed
	}
	var fresh []*listener
	for _, at := range wanted {
		old := ls.open[at]
		if slices.Contains(refused, at.target) || old != nil && !old.deaf() {
			continue
		}
		where := at
		if old != nil {
			// What is diverted, and whoever dials it, knows this port.
			where.addr = old.addr
			old.close()
			delete(ls.open, at)
		}
		l, err := ls.listen(ctx, where)
		if err != nil {
			closeAll(fresh)
			return fmt.Errorf("target %s: %w", at.target, err)
		}
		l.at = at
		fresh = append(fresh, l)
	}
	for _, l := range fresh {
		ls.open[l.at] = l
		ls.cfg.Server.serve(l)
	}
	return nil
}

func (ls *Listeners) keep(keep func(place) bool) {
	for at, l := range ls.open {
		if !keep(at) {
			l.close()
			delete(ls.open, at)
		}
	}
}

func closeAll(open []*listener) {
	for _, l := range open {
		l.close()
	}
}

// Fixed are the open listeners whose port was asked for: those that another
// process could not open beside this one. They stay this process's.
func (ls *Listeners) Fixed() (all []*net.TCPListener) {
	ls.mu.Lock()
	defer ls.mu.Unlock()
	for at, l := range ls.open {
		if at.addr.Port() != 0 {
			all = append(all, l.tcp)
		}
	}
	return all
}

// listen opens one listener, or takes one that was handed over.
func (ls *Listeners) listen(ctx context.Context, at place) (*listener, error) {
	if ls.cfg.Inherit != nil {
		if tcp := ls.cfg.Inherit(at.addr); tcp != nil {
			return newListener(at, tcp)
		}
	}
	return listen(ctx, at, ls.cfg.Transparent)
}

// listen opens one listener of plain TCP: a client's MPTCP falls back to it,
// and what we splice must be TCP.
func listen(ctx context.Context, at place, transparent bool) (*listener, error) {
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	if transparent {
		lc.Control = SetTransparent
	}
	network := "tcp6"
	if at.addr.Addr().Is4() {
		network = "tcp4"
	}
	l, err := lc.Listen(ctx, network, at.addr.String())
	if err != nil {
		return nil, ExplainListen(err)
	}
	return newListener(at, l.(*net.TCPListener))
}

// SetTransparent is a net.ListenConfig.Control; see ListenersConfig.Transparent.
func SetTransparent(network, _ string, c syscall.RawConn) error {
	level, option := unix.SOL_IP, unix.IP_TRANSPARENT
	if strings.HasSuffix(network, "6") {
		level, option = unix.SOL_IPV6, unix.IPV6_TRANSPARENT
	}
	var err error
	if cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), level, option, 1) }); cerr != nil {
		return cerr
	}
	if errors.Is(err, unix.EPERM) {
		return fmt.Errorf("%w: making a listener transparent: %w: run as root, or with CAP_NET_ADMIN", ErrPrivilege, err)
	}
	return os.NewSyscallError("making a listener transparent: setsockopt", err)
}

func newListener(at place, tcp *net.TCPListener) (*listener, error) {
	side := PodSide
	if at.addr.Addr().IsLoopback() {
		side = HostSide
	}
	release, err := ReleaseFirst(tcp)
	if err != nil {
		return nil, errors.Join(err, tcp.Close())
	}
	return &listener{at: at, side: side, addr: unmapped(tcp.Addr()), tcp: tcp, closed: make(chan struct{}), release: release}, nil
}

// ExplainListen names the process that has the port, if err is that of a TCP
// listener whose port is in use; any other error is returned as it is. It still
// is what err was: errors.Is finds syscall.EADDRINUSE.
func ExplainListen(err error) error {
	var op *net.OpError
	if !errors.Is(err, syscall.EADDRINUSE) || !errors.As(err, &op) {
		return err
	}
	tcp, ok := op.Addr.(*net.TCPAddr)
	if !ok {
		return err
	}
	owner := "another process"
	if pid, name, ok := portOwner(unmapped(tcp)); ok {
		owner = "pid " + strconv.Itoa(pid) + " (" + name + ")"
	}
	return fmt.Errorf("listen tcp %s: in use by %s: %w", tcp, owner, syscall.EADDRINUSE)
}
