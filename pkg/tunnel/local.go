package tunnel

import (
	"errors"
	"io"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/mem"

	"github.com/kasway/kasway/pkg/dial"
)

// localReader reads a local connection into pooled buffers.
type localReader struct {
	r   io.Reader
	raw syscall.RawConn // nil if r is no socket
	// Of the last read of the socket.
	n   int
	buf *[]byte
	err error
	// onReady is attempt, bound once.
	onReady func(fd uintptr) bool
}

func newLocalReader(r io.Reader) *localReader {
	l := &localReader{r: r}
	if s, ok := r.(*net.TCPConn); ok {
		if raw, err := s.SyscallConn(); err == nil {
			l.raw, l.onReady = raw, l.attempt
		}
	}
	return l
}

// read returns what is there next. Both a buffer and an error may be returned.
//
// A socket is read only once it has bytes, with a buffer taken for that moment:
// a connection that waits holds none, which is most of what an idle connection
// would cost.
func (l *localReader) read() (mem.Buffer, error) {
	if l.raw == nil {
		l.buf = buffers.Get(readSize)
		l.n, l.err = l.r.Read(*l.buf)
	} else if err := l.raw.Read(l.onReady); err != nil {
		return nil, err
	}
	buf, n, err := l.buf, l.n, l.err
	l.buf = nil
	if n <= 0 {
		buffers.Put(buf)
		if err == nil && l.raw != nil {
			err = io.EOF
		}
		return nil, err
	}
	if n <= copyBelow {
		m := mem.Copy((*buf)[:n], buffers)
		buffers.Put(buf)
		return m, err
	}
	*buf = (*buf)[:n]
	return mem.NewBuffer(buf, buffers), err
}

// attempt reads without waiting; false asks the runtime to wait.
func (l *localReader) attempt(fd uintptr) bool {
	buf := buffers.Get(readSize)
	n, err := syscall.Read(int(fd), *buf)
	for errors.Is(err, syscall.EINTR) {
		n, err = syscall.Read(int(fd), *buf)
	}
	if errors.Is(err, syscall.EAGAIN) {
		buffers.Put(buf)
		return false
	}
	l.buf, l.n, l.err = buf, n, os.NewSyscallError("read", err)
	return true
}

// reset reports whether the socket is closed, after it read an end. It tells a
// FIN from a RST whose error another goroutine's write has taken: the kernel
// reports that once, and an end to whoever comes next. The other goroutine may
// also have closed the socket by now. It says nothing once our own direction
// has ended too, because then a FIN closes as well.
func (l *localReader) reset() bool {
	if l.raw == nil {
		return false
	}
	closed := true
	_ = l.raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err != nil || info.State == unix.BPF_TCP_CLOSE
	})
	return closed
}

// localWriter writes messages to a local connection.
type localWriter struct {
	w io.Writer
	// tcp takes a message's buffers in one system call; nil if w is no socket.
	tcp     *net.TCPConn
	scratch [][]byte
}

func newLocalWriter(w io.Writer) *localWriter {
	l := &localWriter{w: w}
	switch t := w.(type) {
	case *dial.TCP:
		l.tcp = t.TCPConn
	case *net.TCPConn:
		l.tcp = t
	}
	if l.tcp != nil {
		// Only memory is at stake, so failing does not matter.
		_ = l.tcp.SetWriteBuffer(localSendBuffer)
	}
	return l
}

// write writes all of m, which stays the caller's.
func (l *localWriter) write(m mem.BufferSlice) (int64, error) {
	if l.tcp != nil && len(m) > 1 {
		l.scratch = l.scratch[:0]
		for _, b := range m {
			l.scratch = append(l.scratch, b.ReadOnlyData())
		}
		v := net.Buffers(l.scratch)
		return v.WriteTo(l.tcp)
	}
	var total int64
	for _, b := range m {
		n, err := l.w.Write(b.ReadOnlyData())
		total += int64(n)
		if err != nil {
			return total, err
		}
	}
	return total, nil
}
