package cgroupbpf_test

import (
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
)

// rawEnv holds the socket that a process of this binary is to make.
const rawEnv = "KASWAY_TEST_RAW"

// socketSpec is a socket and its connect, by system calls: what package net does
// not let one choose.
type socketSpec struct {
	To     netip.AddrPort
	V6     bool // the socket is AF_INET6, v4-mapped if To is IPv4
	UDP    bool
	Proto  int
	Source netip.Addr
	Device string
	Mark   int
	TFO    bool
	Block  bool // block while connecting
	// Again is where the same socket connects when the first connect is over,
	// whether it failed or not.
	Again   netip.AddrPort
	Request string
	// Port to bind to, with Source.
	Port uint16
	// Flood connects that often, without waiting for any, from the ports behind
	// Port.
	Flood int
}

// socketResult is what became of it.
type socketResult struct {
	Errno int
	Took  time.Duration  // of the connect
	Peer  netip.AddrPort // getpeername
	Reply string
}

// rawClient prints a socketResult.
func rawClient(text string) int {
	var s socketSpec
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 2
	}
	var r socketResult
	var errno unix.Errno
	if s.Flood > 0 {
		if err := s.flood(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
	} else if err := s.run(&r); errors.As(err, &errno) {
		r.Errno = int(errno)
	} else if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	if err := json.NewEncoder(os.Stdout).Encode(r); err != nil {
		return 1
	}
	return 0
}

func (s socketSpec) address(a netip.AddrPort) unix.Sockaddr {
	if s.V6 {
		return &unix.SockaddrInet6{Port: int(a.Port()), Addr: a.Addr().As16()}
	}
	return &unix.SockaddrInet4{Port: int(a.Port()), Addr: a.Addr().As4()}
}

func (s socketSpec) run(r *socketResult) error {
	family, kind := unix.AF_INET, unix.SOCK_STREAM
	if s.V6 {
		family = unix.AF_INET6
	}
	if s.UDP {
		kind = unix.SOCK_DGRAM
	}
	if !s.Block {
		kind |= unix.SOCK_NONBLOCK
	}
	fd, err := unix.Socket(family, kind, s.Proto)
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if err := s.prepare(fd); err != nil {
		return err
	}
	began := time.Now()
	err = unix.Connect(fd, s.address(s.To))
	if err == nil && !s.UDP && !s.TFO || errors.Is(err, unix.EINPROGRESS) {
		err = connected(fd)
	}
	r.Took = time.Since(began)
	if s.Again.IsValid() {
		err = errors.Join(disconnect(fd), unix.Connect(fd, s.address(s.Again)))
	}
	if err != nil {
		return err
	}
	if s.UDP {
		return peer(fd, r)
	}
	// With TCP_FASTOPEN_CONNECT it is the first write that connects.
	if err := s.send(fd, s.TFO); err != nil {
		return err
	}
	if err := connected(fd); err != nil {
		return err
	}
	if err := s.send(fd, !s.TFO); err != nil {
		return err
	}
	if err := peer(fd, r); err != nil {
		return err
	}
	if err := await(fd, unix.POLLIN); err != nil {
		return err
	}
	b := make([]byte, 4096)
	n, err := unix.Read(fd, b)
	r.Reply = string(b[:max(n, 0)])
	return err
}

// flood begins connects and resets them.
func (s socketSpec) flood() error {
	first := s.Port
	for i := range s.Flood {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_NONBLOCK, 0)
		if err != nil {
			return err
		}
		s.Port = first + uint16(i)%(65535-first)
		err = errors.Join(s.prepare(fd), unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &unix.Linger{Onoff: 1}))
		if err == nil {
			// It goes nowhere, or is refused: the hooks have run.
			_ = unix.Connect(fd, s.address(s.To))
		}
		if err := errors.Join(err, unix.Close(fd)); err != nil {
			return err
		}
	}
	return nil
}

func (s socketSpec) send(fd int, now bool) error {
	if !now || s.Request == "" {
		return nil
	}
	_, err := unix.Write(fd, []byte(s.Request))
	if s.TFO && errors.Is(err, unix.EINPROGRESS) {
		return nil
	}
	return err
}

// disconnect lets a socket connect once more.
func disconnect(fd int) error {
	unspec := unix.RawSockaddr{Family: unix.AF_UNSPEC}
	if _, _, errno := unix.Syscall(unix.SYS_CONNECT, uintptr(fd), uintptr(unsafe.Pointer(&unspec)), unsafe.Sizeof(unspec)); errno != 0 {
		return errno
	}
	return nil
}

func connected(fd int) error {
	if err := await(fd, unix.POLLOUT); err != nil {
		return err
	}
	if e, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR); err != nil {
		return err
	} else if e != 0 {
		return unix.Errno(e)
	}
	return nil
}

func (s socketSpec) prepare(fd int) (err error) {
	// A blocking connect that nobody answers ends with EINPROGRESS.
	err = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_SNDTIMEO, &unix.Timeval{Sec: 5})
	if s.Mark != 0 {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, s.Mark))
	}
	if s.Device != "" {
		err = errors.Join(err, unix.SetsockoptString(fd, unix.SOL_SOCKET, unix.SO_BINDTODEVICE, s.Device))
	}
	if s.TFO {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_TCP, unix.TCP_FASTOPEN_CONNECT, 1))
	}
	if s.Source.IsValid() {
		err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1),
			unix.Bind(fd, s.address(netip.AddrPortFrom(s.Source, s.Port))))
	}
	return err
}

func await(fd int, events int16) error {
	n, err := unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: events}}, 5000)
	if err == nil && n == 0 {
		return unix.ETIMEDOUT
	}
	return err
}

func peer(fd int, r *socketResult) error {
	sa, err := unix.Getpeername(fd)
	switch sa := sa.(type) {
	case *unix.SockaddrInet4:
		r.Peer = netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(sa.Port))
	case *unix.SockaddrInet6:
		r.Peer = netip.AddrPortFrom(netip.AddrFrom16(sa.Addr), uint16(sa.Port))
	}
	return err
}

// connectFrom runs s in a process of the host, in its cgroup.
func connectFrom(h *netns.Host, s socketSpec) (r socketResult, err error) {
	text, err := json.Marshal(s)
	if err != nil {
		return r, err
	}
	cmd := h.Command("/proc/self/exe")
	cmd.Env = append(os.Environ(), rawEnv+"="+string(text))
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = time.Second
	out, err := cmd.StdoutPipe()
	if err != nil {
		return r, err
	}
	if err := cmd.Start(); err != nil {
		return r, err
	}
	err = json.NewDecoder(out).Decode(&r)
	return r, errors.Join(err, cmd.Wait())
}

// nativeWord and nativeHalf are numbers whose bytes are in network order.
func nativeWord(b []byte) uint32 { return binary.NativeEndian.Uint32(b) }

func nativeHalf(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}
