package nft

import (
	"errors"
	"fmt"
	"net/netip"
	"os"

	"golang.org/x/sys/unix"
)

// pulse sends heartbeats: datagrams that a rule of ours takes as one and drops.
//
// To renew the set over netlink would do too, but every transaction starts all
// readers of the ruleset over again: with one each half second, `nft list
// ruleset` of 50,000 rules (8 s) never ends. And it would wait, as no packet
// does, for the transactions of others.
type pulse struct {
	fd int
	to *unix.SockaddrInet4
}

// openPulse makes the socket in the calling thread's network namespace.
func openPulse(to netip.AddrPort, mark uint32) (*pulse, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
	if err != nil {
		return nil, fmt.Errorf("heartbeat: %w", os.NewSyscallError("socket", err))
	}
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		_ = unix.Close(fd) // never used
		return nil, fmt.Errorf("heartbeat: setting the mark of our sockets: %w", os.NewSyscallError("setsockopt", err))
	}
	return &pulse{fd: fd, to: &unix.SockaddrInet4{Addr: to.Addr().As4(), Port: int(to.Port())}}, nil
}

var errPulse = errors.New("heartbeat: no rule of ours took it")

// send sends one heartbeat. That the rule dropped it shows as EPERM.
func (p *pulse) send() error {
	switch err := unix.Sendto(p.fd, nil, 0, p.to); {
	case errors.Is(err, unix.EPERM):
		return nil
	case err != nil:
		return fmt.Errorf("heartbeat: %w", os.NewSyscallError("sendto", err))
	}
	return errPulse
}

// close must not be called beside send, nor twice.
func (p *pulse) close() error { return os.NewSyscallError("close", unix.Close(p.fd)) }
