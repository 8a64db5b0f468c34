package netns

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"runtime"
	"sync"

	"golang.org/x/sys/unix"
)

// A caller is a process in a host's namespace and cgroup that makes sockets and
// connects them for the lab's process, which may be in neither: the kernel
// judges a socket by the cgroup of the task that made it, and shows the task
// that calls connect to hooks there.
//
// Threads of the lab's process cannot take its place. They can be moved only
// into a threaded cgroup, where nobody can make a sub-cgroup that a process may
// enter (EOPNOTSUPP), as agents and container runtimes do.
type caller struct {
	cmd  *Cmd
	mu   sync.Mutex // one request at a time
	conn *os.File
}

// callerEnv marks the process that is to be a caller; its requests come over
// descriptor 3, one for each packet.
const callerEnv = "KASWAY_LAB_CALLER"

func init() {
	if os.Getenv(callerEnv) == "" {
		return
	}
	runtime.LockOSThread()
	// What hooks and /proc show as the client's command.
	_ = os.WriteFile("/proc/self/comm", []byte("lab-client"), 0)
	if err := serveCalls(3); err != nil {
		fmt.Fprintln(os.Stderr, "netns: a caller:", err)
		os.Exit(1)
	}
	os.Exit(0)
}

// request makes a socket (Op opSocket) or connects the one that comes with it.
type request struct {
	Op                     uint32
	Family, Type, Protocol int32
	To                     [16]byte
	Port                   uint16
}

const (
	opSocket  = 1
	opConnect = 2
)

func (r request) sockaddr() unix.Sockaddr {
	if r.Family == unix.AF_INET {
		return &unix.SockaddrInet4{Addr: [4]byte(r.To[:4]), Port: int(r.Port)}
	}
	return &unix.SockaddrInet6{Addr: r.To, Port: int(r.Port)}
}

// serveCalls answers requests until the other end is closed.
func serveCalls(conn int) error {
	for {
		var q request
		packet := make([]byte, binary.Size(q))
		n, passed, err := receive(conn, packet)
		if err != nil || n == 0 {
			return err
		}
		if _, err := binary.Decode(packet[:n], binary.NativeEndian, &q); err != nil {
			return err
		}
		fd, errno := passed, error(nil)
		if q.Op == opSocket {
			fd, errno = unix.Socket(int(q.Family), int(q.Type), int(q.Protocol))
		} else {
			errno = unix.Connect(passed, q.sockaddr())
			// Before the answer: a client that closes its own must be the last.
			_ = unix.Close(passed)
			fd = -1
		}
		var rights []byte
		if fd >= 0 {
			rights = unix.UnixRights(fd)
		}
		var number unix.Errno
		errors.As(errno, &number)
		err = unix.Sendmsg(conn, binary.NativeEndian.AppendUint32(nil, uint32(number)), rights, nil, 0)
		if fd >= 0 {
			_ = unix.Close(fd)
		}
		if err != nil {
			return err
		}
	}
}

// receive returns a packet's length and the descriptor that came with it, or -1.
func receive(conn int, packet []byte) (n, passed int, err error) {
	oob := make([]byte, unix.CmsgSpace(4))
	var oobn int
	for {
		n, oobn, _, _, err = unix.Recvmsg(conn, packet, oob, unix.MSG_CMSG_CLOEXEC)
		if !errors.Is(err, unix.EINTR) {
			break
		}
	}
	if err != nil || oobn == 0 {
		return n, -1, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil || len(messages) != 1 {
		return n, -1, errors.Join(err, errors.New("no descriptor in a control message"))
	}
	fds, err := unix.ParseUnixRights(&messages[0])
	if err != nil {
		return n, -1, err
	}
	return n, fds[0], nil
}

// caller is the host's, started when the first one dials.
func (h *Host) caller() (*caller, error) {
	h.callerMu.Lock()
	defer h.callerMu.Unlock()
	if h.calls != nil {
		return h.calls, nil
	}
	pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_SEQPACKET|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("netns: a caller of %s: %w", h.Label, err)
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "caller"), os.NewFile(uintptr(pair[1]), "caller")
	defer theirs.Close()
	c := &caller{cmd: h.Command("/proc/self/exe"), conn: ours}
	c.cmd.Args = []string{"lab-client", h.Label}
	c.cmd.Env = append(os.Environ(), callerEnv+"=1")
	c.cmd.ExtraFiles = []*os.File{theirs}
	c.cmd.Stderr = os.Stderr
	if err := c.cmd.Start(); err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	h.calls = c
	return c, nil
}

// do sends one request and waits for its answer.
func (c *caller) do(q request, fd int) (passed int, err error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	packet, err := binary.Append(nil, binary.NativeEndian, q)
	if err != nil {
		return -1, err
	}
	var rights []byte
	if fd >= 0 {
		rights = unix.UnixRights(fd)
	}
	conn := int(c.conn.Fd())
	if err := unix.Sendmsg(conn, packet, rights, nil, 0); err != nil {
		return -1, fmt.Errorf("netns: asking %s: %w", c.cmd, err)
	}
	answer := make([]byte, 4)
	n, passed, err := receive(conn, answer)
	if err == nil && n < len(answer) {
		err = errors.New("it has ended")
	}
	if err != nil {
		return -1, fmt.Errorf("netns: asking %s: %w", c.cmd, err)
	}
	if number := unix.Errno(binary.NativeEndian.Uint32(answer)); number != 0 {
		return passed, number
	}
	return passed, nil
}

// socket makes a socket that does not block.
func (c *caller) socket(family, kind, protocol int) (int, error) {
	return c.do(request{Op: opSocket, Family: int32(family), Type: int32(kind | unix.SOCK_CLOEXEC | unix.SOCK_NONBLOCK),
		Protocol: int32(protocol)}, -1)
}

// connect connects fd as far as that is possible without blocking.
func (c *caller) connect(fd int, to netip.AddrPort) error {
	q := request{Op: opConnect, Family: unix.AF_INET, Port: to.Port()}
	if to.Addr().Is6() {
		q.Family = unix.AF_INET6
	}
	copy(q.To[:], to.Addr().AsSlice())
	_, err := c.do(q, fd)
	return err
}

func (c *caller) close() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.conn.Close()
}
