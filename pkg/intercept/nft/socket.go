package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"os"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
)

// socket is a netlink socket to nf_tables in the network namespace of the
// thread that opened it. Tables with the flag owner that are made over it live
// as long as it. Its methods may be called concurrently.
type socket struct {
	mu  sync.Mutex
	fd  int // -1: closed
	seq uint32
}

func openSocket() (*socket, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, fmt.Errorf("opening a netlink socket to nf_tables: %w", os.NewSyscallError("socket", err))
	}
	if err := unix.Bind(fd, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		_ = unix.Close(fd) // never used
		return nil, fmt.Errorf("opening a netlink socket to nf_tables: %w", os.NewSyscallError("bind", err))
	}
	return &socket{fd: endsFirst(fd)}, nil
}

// endsFirst moves a socket to a descriptor that a killed process loses before
// all others (see intercept.ReleaseFirst; this one is opened after the
// listeners and so is above them): its tables must be gone, and nothing be
// diverted any more, before the listeners are.
func endsFirst(fd int) int {
	high, err := unix.FcntlInt(uintptr(fd), unix.F_DUPFD_CLOEXEC, intercept.FirstReleased)
	if err != nil {
		return fd // fewer descriptors are allowed: any order will do
	}
	_ = unix.Close(fd) // high holds it
	return high
}

// close closes the socket, and with it removes the tables that it owns.
func (s *socket) close() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return nil
	}
	fd := s.fd
	s.fd = -1
	return os.NewSyscallError("close", unix.Close(fd))
}

func (s *socket) isClosed() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.fd < 0
}

// commit runs the batch as one transaction: all of it, or none. The error
// names the first message that the kernel rejected.
func (s *socket) commit(b *batch) error {
	if b.err != nil {
		return b.err
	}
	first, replies, err := s.exchange(b.messages())
	if err != nil {
		return err
	}
	acked := false
	for _, r := range replies {
		if err := answer(r); err != nil {
			return fmt.Errorf("nftables: %s: %w", b.describe(int(r.Header.Sequence-first)), err)
		}
		acked = acked || r.Header.Type == netlink.Error
	}
	if !acked {
		return errors.New("nftables: the kernel did not answer the transaction")
	}
	return nil
}

// exchange sends messages in one datagram and returns what the kernel answers,
// and the sequence number that the first message was given. The kernel works
// while sendto lasts, so that every answer is queued when it returns.
func (s *socket) exchange(msgs []netlink.Message) (first uint32, replies []netlink.Message, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.fd < 0 {
		return 0, nil, fmt.Errorf("nftables: %w", os.ErrClosed)
	}
	first = s.seq + 1
	var wire []byte
	for _, m := range msgs {
		s.seq++
		m.Header.Sequence = s.seq
		m.Header.Length = uint32(unix.NLMSG_HDRLEN + len(m.Data))
		b, err := m.MarshalBinary()
		if err != nil {
			return 0, nil, fmt.Errorf("nftables: encoding a message: %w", err)
		}
		wire = append(wire, b...)
	}
	if len(wire) > 64<<10 {
		// The default holds about 200 KiB; a failure shows in sendto.
		_ = unix.SetsockoptInt(s.fd, unix.SOL_SOCKET, unix.SO_SNDBUFFORCE, 2*len(wire))
	}
	if err := unix.Sendto(s.fd, wire, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return 0, nil, fmt.Errorf("nftables: %w", os.NewSyscallError("sendto", err))
	}
	replies, err = s.receive()
	return first, replies, err
}

// receive empties the receive queue.
func (s *socket) receive() (all []netlink.Message, err error) {
	buf := make([]byte, 64<<10)
	for {
		n, _, err := unix.Recvfrom(s.fd, buf, unix.MSG_DONTWAIT)
		switch {
		case errors.Is(err, unix.EAGAIN):
			return all, nil
		case errors.Is(err, unix.EINTR), errors.Is(err, unix.ENOBUFS):
			continue // ENOBUFS: there were more errors than fit; the first are there
		case err != nil:
			return nil, fmt.Errorf("nftables: %w", os.NewSyscallError("recvfrom", err))
		}
		msgs, err := parse(buf[:n])
		if err != nil {
			return nil, err
		}
		all = append(all, msgs...)
	}
}

// parse splits a datagram into messages; they hold copies of it.
func parse(datagram []byte) (msgs []netlink.Message, err error) {
	for len(datagram) >= unix.NLMSG_HDRLEN {
		length := int(binary.NativeEndian.Uint32(datagram))
		if length < unix.NLMSG_HDRLEN || length > len(datagram) {
			return nil, fmt.Errorf("nftables: a message of %d bytes in %d", length, len(datagram))
		}
		padded := min((length+3)&^3, len(datagram))
		msgs = append(msgs, netlink.Message{
			Header: netlink.Header{
				Length:   uint32(length),
				Type:     netlink.HeaderType(binary.NativeEndian.Uint16(datagram[4:])),
				Flags:    netlink.HeaderFlags(binary.NativeEndian.Uint16(datagram[6:])),
				Sequence: binary.NativeEndian.Uint32(datagram[8:]),
			},
			Data: append([]byte(nil), datagram[unix.NLMSG_HDRLEN:length]...),
		})
		datagram = datagram[padded:]
	}
	return msgs, nil
}
