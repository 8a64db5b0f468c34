package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Dial connects from inside the namespace and the host's cgroup, as a process
// there would. The host part must be an IP address: the resolver belongs to the
// machine's own namespace.
func (h *Host) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return h.DialWith(ctx, &net.Dialer{}, network, address)
}

// DialWith is Dial with the caller's Dialer, of which Timeout, Deadline,
// LocalAddr, Control, ControlContext and multipath TCP have their meaning.
// Errors are those of a net.Dialer.
func (h *Host) DialWith(ctx context.Context, d *net.Dialer, network, address string) (net.Conn, error) {
	to, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil, fmt.Errorf("netns: dialling %q from %s: not an IP address: %w", address, h.Label, err)
	}
	to = netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	c, err := h.dial(ctx, d, network, to)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Addr: net.TCPAddrFromAddrPort(to), Err: err}
	}
	return c, nil
}

func (h *Host) dial(ctx context.Context, d *net.Dialer, network string, to netip.AddrPort) (net.Conn, error) {
	ctx, cancel := limited(ctx, d)
	defer cancel()
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	calls, err := h.caller()
	if err != nil {
		return nil, err
	}
	family, kind, protocol := unix.AF_INET, unix.SOCK_STREAM, 0
	if to.Addr().Is6() {
		family = unix.AF_INET6
	}
	if strings.HasPrefix(network, "udp") {
		kind = unix.SOCK_DGRAM
	} else if d.MultipathTCP() {
		protocol = unix.IPPROTO_MPTCP
	}
	fd, err := calls.socket(family, kind, protocol)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	f := os.NewFile(uintptr(fd), "socket")
	defer f.Close()
	if err := prepare(ctx, d, f, network, to); err != nil {
		return nil, err
	}
	err = calls.connect(fd, to)
	if errors.Is(err, unix.EINPROGRESS) {
		err = connected(ctx, f)
	}
	if err != nil {
		return nil, os.NewSyscallError("connect", err)
	}
	c, err := net.FileConn(f)
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetNoDelay(true) // as every Dialer does
	}
	return c, err
}

// limited is ctx with the limits that d adds.
func limited(ctx context.Context, d *net.Dialer) (context.Context, context.CancelFunc) {
	end := d.Deadline
	if d.Timeout > 0 {
		if by := time.Now().Add(d.Timeout); end.IsZero() || by.Before(end) {
			end = by
		}
	}
	if end.IsZero() {
		return context.WithCancel(ctx)
	}
	return context.WithDeadline(ctx, end)
}

// prepare does what a Dialer does between socket and connect.
func prepare(ctx context.Context, d *net.Dialer, f *os.File, network string, to netip.AddrPort) error {
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	control := d.ControlContext
	if control == nil && d.Control != nil {
		control = func(_ context.Context, network, address string, c syscall.RawConn) error {
			return d.Control(network, address, c)
		}
	}
	if control != nil {
		if n := len(network); network[n-1] != '4' && network[n-1] != '6' {
			network += map[bool]string{true: "4", false: "6"}[to.Addr().Is4()]
		}
		if err := control(ctx, network, to.String(), raw); err != nil {
			return err
		}
	}
	if d.LocalAddr == nil {
		return nil
	}
	local, err := netip.ParseAddrPort(d.LocalAddr.String())
	if err != nil {
		return err
	}
	from := request{Family: unix.AF_INET, Port: local.Port()}
	if to.Addr().Is6() {
		from.Family = unix.AF_INET6
	}
	copy(from.To[:], local.Addr().AsSlice())
	cerr := raw.Control(func(fd uintptr) { err = unix.Bind(int(fd), from.sockaddr()) })
	return errors.Join(cerr, os.NewSyscallError("bind", err))
}

// connected waits for the end of a connect that did not block.
func connected(ctx context.Context, f *os.File) error {
	if end, ok := ctx.Deadline(); ok {
		if err := f.SetWriteDeadline(end); err != nil {
			return err
		}
	}
	defer context.AfterFunc(ctx, func() { _ = f.SetWriteDeadline(time.Unix(1, 0)) })()
	raw, err := f.SyscallConn()
	if err != nil {
		return err
	}
	var number int
	var inner error
	err = raw.Write(func(fd uintptr) bool {
		ready := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLOUT}}
		n, err := unix.Poll(ready, 0)
		if n == 0 || errors.Is(err, unix.EINTR) {
			return false
		}
		number, inner = unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		inner = errors.Join(err, inner)
		return true
	})
	switch {
	case err != nil && errors.Is(ctx.Err(), context.Canceled):
		return context.Canceled
	case err != nil:
		return err // os.ErrDeadlineExceeded, if that is what it was
	case inner != nil:
		return inner
	case number != 0:
		return unix.Errno(number)
	}
	return nil
}
