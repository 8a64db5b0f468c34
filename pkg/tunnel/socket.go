package tunnel

import (
	"net"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// rawConn finds the socket under a connection that may be wrapped; false if
// there is none.
func rawConn(c net.Conn) (syscall.RawConn, bool) {
	for c != nil {
		if s, ok := c.(syscall.Conn); ok {
			raw, err := s.SyscallConn()
			return raw, err == nil
		}
		w, ok := c.(interface{ NetConn() net.Conn })
		if !ok {
			return nil, false
		}
		c = w.NetConn()
	}
	return nil, false
}

// tune sets what a link's socket needs. grpc-go sets TCP_USER_TIMEOUT too, but
// only on a bare *net.TCPConn, which the links' sockets are not. A connection
// that is no TCP socket has no such options, and works without.
func tune(c net.Conn) {
	raw, ok := rawConn(c)
	if !ok {
		return
	}
	_ = raw.Control(func(fd uintptr) {
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT, int(keepaliveTimeout/time.Millisecond))
		_ = unix.SetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, notSentLowat)
	})
}

// roundTrip is the kernel's smoothed estimate; 0 if there is none.
func roundTrip(c net.Conn) time.Duration {
	raw, ok := rawConn(c)
	if !ok {
		return 0
	}
	var rtt time.Duration
	_ = raw.Control(func(fd uintptr) {
		if info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO); err == nil {
			rtt = time.Duration(info.Rtt) * time.Microsecond
		}
	})
	return rtt
}

// watched is a link's connection that tells when it is dead, sooner than grpc-go
// tells the streams: it first tries to send a GOAWAY, for up to 5 s.
type watched struct {
	net.Conn
	once sync.Once
	dead func(error)
}

func (w *watched) Read(p []byte) (int, error) {
	n, err := w.Conn.Read(p)
	if err != nil {
		w.end(err)
	}
	return n, err
}

func (w *watched) Write(p []byte) (int, error) {
	n, err := w.Conn.Write(p)
	if err != nil {
		w.end(err)
	}
	return n, err
}

func (w *watched) Close() error {
	err := w.Conn.Close()
	w.end(net.ErrClosed)
	return err
}

func (w *watched) end(err error) { w.once.Do(func() { w.dead(err) }) }
