package intercept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// maxSockets bounds the listening sockets that one agent gives another: the
// kernel passes 253 descriptors with a message.
const maxSockets = 253

// Others lists the generations of the other agents that live in the calling
// thread's network namespace: those of Present behind which there is a process
// that may be one.
func Others(own string) ([]string, error) {
	all, err := Present()
	if err != nil {
		return nil, err
	}
	return slices.DeleteFunc(all, func(g string) bool {
		if g == own {
			return true
		}
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: presencePrefix + g, Net: "unix"})
		if errors.Is(err, syscall.EAGAIN) {
			return false // its queue is full: somebody is there
		}
		if err != nil {
			return true // gone meanwhile
		}
		stranger := trusted(c) != nil
		_ = c.Close() // nothing was said
		return stranger
	}), nil
}

// Asked is a request to another agent, and the connection that keeps it in
// force.
type Asked struct {
	Generation string

	conn    *net.UnixConn
	answer  chan Line
	gone    chan struct{}
	sockets []*net.TCPListener
	once    sync.Once
}

// Ask connects to another agent, from the calling thread's network namespace,
// and says l to it. The caller closes what it gets.
func Ask(ctx context.Context, generation string, l Line) (*Asked, error) {
	c, err := reach(ctx, generation)
	if err != nil {
		return nil, fmt.Errorf("asking agent %s: %w", generation, err)
	}
	if err := trusted(c); err != nil {
		return nil, errors.Join(fmt.Errorf("asking agent %s: %w", generation, err), c.Close())
	}
	if _, err := c.Write([]byte(l.String())); err != nil {
		return nil, errors.Join(fmt.Errorf("asking agent %s: %w", generation, err), c.Close())
	}
	a := &Asked{Generation: generation, conn: c, answer: make(chan Line, 1), gone: make(chan struct{})}
	go a.listen()
	return a, nil
}

// reach connects, and again while the other's queue is full.
func reach(ctx context.Context, generation string) (*net.UnixConn, error) {
	for {
		c, err := net.DialUnix("unix", nil, &net.UnixAddr{Name: presencePrefix + generation, Net: "unix"})
		if err == nil || !errors.Is(err, syscall.EAGAIN) {
			return c, err
		}
		select {
		case <-time.After(presencePause):
		case <-ctx.Done():
			return nil, err
		}
	}
}

// listen waits for the answer, and then for the end.
func (a *Asked) listen() {
	defer close(a.gone)
	b, rights := make([]byte, MaxLine), make([]byte, unix.CmsgSpace(4*maxSockets))
	n, got, flags, _, err := a.conn.ReadMsgUnix(b, rights)
	if err != nil {
		return
	}
	a.sockets, err = received(rights[:got])
	l, lerr := ParseLine(b[:n])
	if err != nil || lerr != nil || flags&unix.MSG_CTRUNC != 0 || l.Verb != VerbYes && l.Verb != VerbNo {
		a.dropSockets()
		return
	}
	a.answer <- l
	_, _ = a.conn.Read(make([]byte, 1)) // nothing more is said
}

// received are the listeners among descriptors from another process.
func received(rights []byte) (all []*net.TCPListener, err error) {
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, fmt.Errorf("taking listeners over: %w", err)
	}
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			continue // of another kind
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			f := os.NewFile(uintptr(fd), "listener")
			l, lerr := net.FileListener(f) // a copy
			_ = f.Close()
			if tcp, ok := l.(*net.TCPListener); lerr == nil && ok {
				all = append(all, tcp)
			} else if lerr == nil {
				_ = l.Close()
			}
		}
	}
	return all, nil
}

// Answer waits for the other's answer. It fails when ctx ends, and if the other
// has ended or says what cannot be understood.
func (a *Asked) Answer(ctx context.Context) (Line, error) {
	select {
	case l := <-a.answer:
		return l, nil
	default:
	}
	select {
	case l := <-a.answer:
		return l, nil
	case <-a.gone:
		select {
		case l := <-a.answer:
			return l, nil
		default:
			return Line{}, fmt.Errorf("agent %s has hung up", a.Generation)
		}
	case <-ctx.Done():
		return Line{}, fmt.Errorf("agent %s does not answer: %w", a.Generation, ctx.Err())
	}
}

// Gone is closed when the other has ended, or hung up.
func (a *Asked) Gone() <-chan struct{} { return a.gone }

// Take returns the listener at addr that came with the answer, if there is one,
// and gives it away.
func (a *Asked) Take(addr netip.AddrPort) *net.TCPListener {
	i := slices.IndexFunc(a.sockets, func(l *net.TCPListener) bool { return unmapped(l.Addr()) == addr })
	if i < 0 {
		return nil
	}
	l := a.sockets[i]
	a.sockets = slices.Delete(a.sockets, i, i+1)
	return l
}

// Close ends the request: the other agent need not act upon it any longer.
func (a *Asked) Close() {
	a.once.Do(func() {
		_ = a.conn.Close()
		<-a.gone
		a.dropSockets()
	})
}

func (a *Asked) dropSockets() {
	for _, l := range a.sockets {
		_ = l.Close()
	}
	a.sockets = nil
}

// trusted is nil if the process at the other end of c may be an agent of this
// node: by its user when it connected, or began to listen.
func trusted(c *net.UnixConn) error {
	cred, err := peerCredentials(c)
	if err != nil {
		return err
	}
	return trustedUID(cred.Uid, os.Geteuid())
}

var errNotAnAgent = errors.New("the process there is another user's")

func trustedUID(peer uint32, own int) error {
	if peer == 0 || int64(peer) == int64(own) {
		return nil
	}
	return fmt.Errorf("uid %d: %w", peer, errNotAnAgent)
}

func peerPID(c *net.UnixConn) int {
	cred, err := peerCredentials(c)
	if err != nil {
		return 0
	}
	return int(cred.Pid)
}

func peerCredentials(c *net.UnixConn) (cred *unix.Ucred, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("who is there: %w", err)
	}
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(cerr, err); err != nil {
		return nil, fmt.Errorf("who is there: %w", err)
	}
	return cred, nil
}

// Stamp is the time by which agents tell who is newer.
func Stamp() (int64, error) {
	var t unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &t); err != nil {
		return 0, fmt.Errorf("reading the clock: %w", err)
	}
	return t.Nano(), nil
}
