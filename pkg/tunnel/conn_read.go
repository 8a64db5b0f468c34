package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/mem"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// readHalf is the receiving direction. All but the deadline belongs to the
// holder of the gate.
type readHalf struct {
	gate     gate
	deadline deadline
	// receiving is not nil while a goroutine receives for Read; it is closed
	// when got and gotErr are there. It outlives a Read that timed out.
	receiving chan struct{}
	got       mem.BufferSlice
	gotErr    error
	// unread is what the last Read left of a message, offset how far into its
	// first buffer that one came.
	unread   mem.BufferSlice
	offset   int
	err      error // once set, what every read returns
	accepted bool  // agent: the server said that it has dialled
	// drained: the end was passed on to the caller, all before it as well.
	drained atomic.Bool
}

// receive waits for the next message. errEnd is the end of the direction, any
// other error the end of the stream; after either it must not be called again.
// The caller frees the message.
func (c *Conn) receive() (mem.BufferSlice, error) {
	if err := c.accept(); err != nil {
		return nil, err
	}
	var m mem.BufferSlice
	err := c.stream.RecvMsg(&m)
	switch {
	case err != nil:
		return nil, c.fail(c.farEnd(err))
	case c.ctx.Err() != nil:
		// gRPC goes on delivering what it had received before a reset.
		m.Free()
		return nil, context.Cause(c.ctx)
	case m.Len() == 0:
		m.Free()
		c.endedRemote.Store(true)
		if c.agent != nil {
			go c.awaitFinal()
		}
		return nil, errEnd
	}
	c.bytes.received.Add(float64(m.Len()))
	return m, nil
}

// accept waits for the response header, which is the server's word that the
// target was dialled.
func (c *Conn) accept() error {
	if c.agent == nil || c.read.accepted {
		return nil
	}
	header, err := c.agent.Header()
	if err != nil {
		return c.fail(fromStatus(err))
	}
	// No header at all: the final status, which comes next, says why.
	if header != nil && len(header.Get(tunnelpb.KeyAccepted)) == 0 {
		return c.fail(fmt.Errorf("%w: response without %s, is the peer a Kasway server?", dial.ErrLost, tunnelpb.KeyAccepted))
	}
	c.read.accepted = true
	return nil
}

// awaitFinal waits for the final status after the server ended its direction. A
// reset that comes now must still end this side's direction.
func (c *Conn) awaitFinal() {
	var m mem.BufferSlice
	if err := c.stream.RecvMsg(&m); err != nil {
		_ = c.fail(c.farEnd(err))
		return
	}
	m.Free()
	_ = c.fail(fmt.Errorf("%w: message after the end of the direction", dial.ErrLost))
}

// farEnd says what an error of RecvMsg means.
func (c *Conn) farEnd(err error) error {
	switch {
	case c.ctx.Err() != nil:
		return context.Cause(c.ctx)
	case !isEnd(err) && c.agent != nil:
		return fromStatus(err)
	case !isEnd(err):
		return c.lost()
	case c.agent != nil && c.endedLocal.Load() && c.endedRemote.Load():
		return errClean
	}
	return fmt.Errorf("%w: stream ended before its directions did", dial.ErrLost)
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	r := &c.read
	if err := c.lock(r.gate, &r.deadline); err != nil {
		return 0, err
	}
	defer r.gate.unlock()
	for {
		if err := c.ready(&r.deadline); err != nil {
			return 0, err
		}
		switch {
		case r.unread != nil:
			return c.copyUnread(p), nil
		case errors.Is(r.err, errEnd):
			r.drained.Store(true)
			return 0, io.EOF
		case r.err != nil:
			return 0, r.err
		case len(p) == 0:
			return 0, nil
		case r.receiving == nil:
			c.startReceive()
		}
		select {
		case <-r.receiving:
			c.takeReceived()
		case <-r.deadline.wait():
		case <-c.closed:
		case <-c.ctx.Done():
			if !c.endedRemote.Load() {
				return 0, context.Cause(c.ctx)
			}
			// The end came first, and whoever received it is about to say so.
			<-r.receiving
			c.takeReceived()
		}
	}
}

// startReceive receives one message in a goroutine of its own, so that Read can
// give up waiting and a later one find it.
func (c *Conn) startReceive() {
	done := make(chan struct{})
	c.read.receiving = done
	go func() {
		defer close(done)
		c.read.got, c.read.gotErr = c.receive()
	}()
}

// takeReceived picks up what startReceive brought.
func (c *Conn) takeReceived() {
	r := &c.read
	if r.err = r.gotErr; r.err == nil {
		r.unread, r.offset = r.got, 0
	}
	r.receiving, r.got, r.gotErr = nil, nil, nil
}

func (c *Conn) copyUnread(p []byte) int {
	r, n := &c.read, 0
	for n < len(p) && len(r.unread) > 0 {
		data := r.unread[0].ReadOnlyData()[r.offset:]
		k := copy(p[n:], data)
		n += k
		r.offset += k
		if k == len(data) {
			r.unread[0].Free()
			r.unread, r.offset = r.unread[1:], 0
		}
	}
	if len(r.unread) == 0 {
		r.unread = nil
	}
	return n
}

// takeUnread hands over the rest of a message that a Read began.
func (c *Conn) takeUnread() mem.BufferSlice {
	r := &c.read
	m := r.unread
	if r.offset > 0 {
		rest := m[0].Slice(r.offset, m[0].Len())
		m[0].Free()
		m[0] = rest
	}
	r.unread, r.offset = nil, 0
	return m
}

// WriteTo implements io.WriterTo: it passes on what arrives until the direction
// ends. When the stream is reset while w blocks, and w has write deadlines, w
// is interrupted by one.
func (c *Conn) WriteTo(w io.Writer) (int64, error) {
	r := &c.read
	if r.deadline.armed() {
		return io.Copy(w, struct{ io.Reader }{c})
	}
	if err := c.lock(r.gate, &r.deadline); err != nil {
		return 0, err
	}
	defer r.gate.unlock()
	if d, ok := w.(interface{ SetWriteDeadline(time.Time) error }); ok {
		defer context.AfterFunc(c.ctx, func() { _ = d.SetWriteDeadline(time.Unix(1, 0)) })()
	}
	if r.receiving != nil {
		select {
		case <-r.receiving:
			c.takeReceived()
		case <-c.closed:
			return 0, net.ErrClosed
		}
	}
	var total int64
	out := newLocalWriter(w)
	for {
		m, err := c.nextMessage()
		if errors.Is(err, errEnd) {
			r.drained.Store(true)
			return total, nil
		}
		if err != nil {
			return total, err
		}
		n, err := out.write(m)
		m.Free()
		total += n
		if err != nil {
			if cause := context.Cause(c.ctx); cause != nil {
				err = cause
			}
			return total, err
		}
	}
}

// nextMessage returns what a Read left, or else receives; the caller holds the
// gate and nobody receives for Read.
func (c *Conn) nextMessage() (m mem.BufferSlice, err error) {
	switch r := &c.read; {
	case r.unread != nil:
		return c.takeUnread(), nil
	case r.err != nil:
		return nil, r.err
	}
	m, err = c.receive()
	c.read.err = err
	return m, err
}

// lock takes a half's gate on behalf of a caller of net.Conn's methods, at once
// if it is free: a stream that is over may still have something to say.
func (c *Conn) lock(g gate, d *deadline) error {
	if err := c.ready(d); err != nil {
		return err
	}
	if g.tryLock() {
		return nil
	}
	select {
	case g <- struct{}{}:
		return nil
	case <-d.wait():
		return os.ErrDeadlineExceeded
	case <-c.closed:
		return net.ErrClosed
	case <-c.ctx.Done():
		return context.Cause(c.ctx)
	}
}

// ready says why a half cannot be used at all.
func (c *Conn) ready(d *deadline) error {
	select {
	case <-c.closed:
		return net.ErrClosed
	case <-d.wait():
		return os.ErrDeadlineExceeded
	default:
		return nil
	}
}
