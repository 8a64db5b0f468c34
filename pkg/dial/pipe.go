package dial

import (
	"errors"
	"io"
	"net"
	"sync"
)

// Result is what Pipe carried: bytes read from a and from b, and why it ended
// (nil after two clean ends).
type Result struct {
	FromA, FromB int64
	Err          error
}

// Pipe carries bytes between a and b until both directions have ended, closes
// both, and returns. A clean end of one direction is passed on as a clean end
// of that direction alone; anything else aborts both, so that a cut never looks
// like an end.
func Pipe(a, b Conn) Result {
	var (
		r    Result
		once sync.Once
		done = make(chan struct{})
	)
	fail := func(err error) {
		once.Do(func() {
			r.Err = err
			a.Abort(err)
			b.Abort(err)
		})
	}
	go func() {
		defer close(done)
		r.FromA = carry(b, a, fail)
	}()
	r.FromB = carry(a, b, fail)
	<-done
	if r.Err == nil {
		// Both waits are bounded by the Conns themselves.
		r.Err = errors.Join(closed(a), closed(b))
	}
	return r
}

func closed(c Conn) error {
	if err := c.Close(); err != nil && !errors.Is(err, net.ErrClosed) {
		return err
	}
	return nil
}

// carry copies one direction and ends it at dst.
func carry(dst, src Conn, fail func(error)) int64 {
	n, err := transfer(dst, src)
	if err == nil {
		err = dst.CloseWrite()
	}
	if err != nil {
		fail(Classify(err))
	}
	return n
}

// transfer lets the side that knows how to move bytes without a copy do it: a
// tunnelled connection reads and writes pooled buffers, two TCP connections
// splice in the kernel.
func transfer(dst, src Conn) (int64, error) {
	if w, ok := src.(io.WriterTo); ok {
		if _, isTCP := src.(*TCP); !isTCP {
			return w.WriteTo(dst)
		}
	}
	if r, ok := dst.(io.ReaderFrom); ok {
		return r.ReadFrom(plain(src))
	}
	// The struct hides WriterTo and ReaderFrom, so that io.Copy does not look
	// for them again.
	return io.Copy(struct{ io.Writer }{dst}, struct{ io.Reader }{src})
}

// plain unwraps to the *net.TCPConn that both splice and pooled reads look for.
func plain(c Conn) io.Reader {
	if t, ok := c.(*TCP); ok {
		return t.TCPConn
	}
	return c
}
