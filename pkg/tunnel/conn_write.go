package tunnel

import (
	"context"
	"io"
	"net"
	"os"
	"syscall"
	"time"

	"google.golang.org/grpc/mem"
)

// writeHalf is the sending direction. All but the deadline belongs to the
// holder of the gate.
type writeHalf struct {
	gate     gate
	deadline deadline
	// sending is closed when the message that Write handed over has left. A
	// failure to send ends the stream, so there is no error to keep here.
	sending chan struct{}
}

// send passes m, and the references in it, on to gRPC. It waits while the far
// side's window is full.
func (c *Conn) send(m mem.BufferSlice) error {
	n := m.Len()
	err := c.stream.SendMsg(m)
	if err == nil {
		c.bytes.sent.Add(float64(n))
		return nil
	}
	if c.agent == nil {
		return c.fail(c.lost())
	}
	// The stream is over, and only receiving says why.
	if c.read.gate.tryLock() {
		if r := &c.read; r.receiving == nil && r.unread == nil && r.err == nil {
			c.startReceive()
		}
		c.read.gate.unlock()
	}
	timer := time.NewTimer(resultWait)
	defer timer.Stop()
	select {
	case <-c.ctx.Done():
	case <-timer.C:
	}
	return c.fail(errUnexplained)
}

// Write implements net.Conn. It returns when all of p is accepted for sending,
// of which one message may still wait for the far side's window.
func (c *Conn) Write(p []byte) (int, error) {
	w := &c.write
	if err := c.lock(w.gate, &w.deadline); err != nil {
		return 0, err
	}
	defer w.gate.unlock()
	n := 0
	for {
		if err := c.waitSent(); err != nil || n == len(p) {
			return n, err
		}
		chunk := p[n:min(len(p), n+readSize)]
		c.startSend(mem.BufferSlice{mem.Copy(chunk, buffers)})
		n += len(chunk)
		if n == len(p) {
			return n, nil
		}
	}
}

// waitSent waits until the next message may be handed over.
func (c *Conn) waitSent() error {
	for {
		if err := c.ready(&c.write.deadline); err != nil {
			return err
		}
		switch {
		case c.ctx.Err() != nil:
			return context.Cause(c.ctx)
		case c.endedLocal.Load():
			return errWriteEnded
		case c.write.sending == nil:
			return nil
		}
		select {
		case <-c.write.sending:
			c.write.sending = nil
		case <-c.write.deadline.wait():
			return os.ErrDeadlineExceeded
		case <-c.closed:
			return net.ErrClosed
		}
	}
}

// startSend sends in a goroutine of its own, so that Write can give up waiting.
func (c *Conn) startSend(m mem.BufferSlice) {
	done := make(chan struct{})
	c.write.sending = done
	go func() {
		defer close(done)
		_ = c.send(m)
	}()
}

// CloseWrite implements dial.Conn. It waits until the bytes written before have
// left, or the stream is over.
func (c *Conn) CloseWrite() error {
	select {
	case <-c.closed:
		return net.ErrClosed
	default:
		return c.endWrite()
	}
}

func (c *Conn) endWrite() error {
	w := &c.write
	if err := w.gate.lockUntil(c.ctx); err != nil {
		return err
	}
	defer w.gate.unlock()
	if c.endedLocal.Load() {
		return nil
	}
	if w.sending != nil {
		<-w.sending // ends with the stream at the latest
		w.sending = nil
	}
	if c.ctx.Err() != nil {
		return context.Cause(c.ctx)
	}
	// Set first: the answer to the message may be here before SendMsg returns.
	c.endedLocal.Store(true)
	if err := c.send(nil); err != nil {
		return err
	}
	if c.agent != nil {
		// Always nil. It saves the server from resetting a stream it has ended.
		_ = c.agent.CloseSend()
	}
	return nil
}

// ReadFrom implements io.ReaderFrom: it sends what r yields until io.EOF, which
// does not end the direction. When the stream is reset while r blocks, and r
// has read deadlines, r is interrupted by one.
func (c *Conn) ReadFrom(r io.Reader) (int64, error) {
	w := &c.write
	if err := c.lock(w.gate, &w.deadline); err != nil {
		return 0, err
	}
	defer w.gate.unlock()
	if err := c.waitSent(); err != nil {
		return 0, err
	}
	if d, ok := r.(interface{ SetReadDeadline(time.Time) error }); ok {
		defer context.AfterFunc(c.ctx, func() { _ = d.SetReadDeadline(time.Unix(1, 0)) })()
	}
	in := newLocalReader(r)
	var total int64
	for {
		m, err := in.read()
		if m != nil {
			n := m.Len()
			if err := c.send(mem.BufferSlice{m}); err != nil {
				return total, err
			}
			total += int64(n)
		}
		switch {
		// In this order: our own end, which closes the socket too, comes after
		// drained is set.
		case isEnd(err) && in.reset() && !c.read.drained.Load():
			return total, os.NewSyscallError("read", syscall.ECONNRESET)
		case isEnd(err):
			return total, nil
		case err != nil && c.ctx.Err() != nil:
			return total, context.Cause(c.ctx)
		case err != nil:
			return total, err
		}
	}
}
