package tunnel

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/mem"

	"github.com/kasway/kasway/pkg/dial"
)

var (
	// errClean is the cause of a stream's end after both directions ended and,
	// on the agent, the server confirmed it. It never leaves this package.
	errClean = errors.New("both directions ended")
	// errEnd: the far side ended its direction. It is not io.EOF, because errors
	// of the operating system and of gRPC wrap that one.
	errEnd = errors.New("end of the direction")
	// errReset: the agent cancelled the stream.
	errReset = fmt.Errorf("%w: reset by the agent", dial.ErrLost)
	// errWriteEnded is what Write returns after CloseWrite.
	errWriteEnded = fmt.Errorf("write after CloseWrite: %w", net.ErrClosed)
	// errUnexplained: sending failed, and no final status came to say why.
	errUnexplained = fmt.Errorf("%w: the far side ended the stream", dial.ErrLost)
	// errUnread: bytes came after Close, which nobody will read.
	errUnread = fmt.Errorf("%w: closed with bytes unread", dial.ErrLost)
	// errUnconfirmed: the far side did not end its part in time.
	errUnconfirmed = fmt.Errorf("%w: far side did not confirm the end within %v", dial.ErrTimeout, closeWait)
)

// isEnd reports whether a reader has come to its end. An error that only wraps
// io.EOF is a failure: taking it for an end would make a cut look clean.
func isEnd(err error) bool {
	return any(err) == any(io.EOF)
}

// abortError is the cause of a stream that this side reset.
type abortError struct{ cause error }

func (e *abortError) Error() string {
	if e.cause == nil {
		return "aborted"
	}
	return "aborted: " + e.cause.Error()
}
func (e *abortError) Unwrap() error { return e.cause }

// transport is what the two ends of a gRPC stream have in common.
type transport interface {
	SendMsg(m any) error
	RecvMsg(m any) error
}

// Conn is one carried connection on a link, seen from either side. It is a
// dial.Conn, an io.WriterTo and an io.ReaderFrom; those two move pooled buffers
// without a copy and are what dial.Pipe uses.
//
// On the agent a Conn is there before the server has dialled: why it did not is
// the error of the first Read, Write, WriteTo or ReadFrom that notices, and
// wraps one of package dial's sentinels.
//
// Its helper goroutines end with the stream, which ends with Close, with Abort
// and with the link.
type Conn struct {
	stream        transport
	agent         grpc.ClientStream // the same stream on the agent, nil on the server
	lost          func() error      // on the server: what the end of stream's context means
	local, remote net.Addr
	bytes         byteCounters

	// ctx is done when the stream is over; its cause says why.
	ctx    context.Context
	cancel context.CancelCauseFunc
	closed chan struct{}
	once   sync.Once

	// ended*: the empty message that ends a direction was sent, or received.
	endedLocal, endedRemote atomic.Bool

	read  readHalf
	write writeHalf
}

// newAgentConn makes the Conn of a stream that was opened with ctx.
func newAgentConn(ctx context.Context, cancel context.CancelCauseFunc, stream grpc.ClientStream, local, remote net.Addr, bytes byteCounters) *Conn {
	c := newConn(ctx, cancel, stream, local, remote, bytes)
	c.agent = stream
	return c
}

// newServerConn makes the Conn of a handler's stream. The handler must return
// when ctx is done: only that interrupts a receive, and resets the stream.
func newServerConn(stream grpc.ServerStream, lost func() error, local, remote net.Addr, bytes byteCounters) *Conn {
	ctx, cancel := context.WithCancelCause(context.WithoutCancel(stream.Context()))
	context.AfterFunc(stream.Context(), func() { cancel(lost()) })
	c := newConn(ctx, cancel, stream, local, remote, bytes)
	c.lost = lost
	return c
}

func newConn(ctx context.Context, cancel context.CancelCauseFunc, stream transport, local, remote net.Addr, bytes byteCounters) *Conn {
	return &Conn{
		stream: stream, local: local, remote: remote, bytes: bytes,
		ctx: ctx, cancel: cancel, closed: make(chan struct{}),
		read:  readHalf{gate: make(gate, 1)},
		write: writeHalf{gate: make(gate, 1)},
	}
}

// LocalAddr is the link's own address.
func (c *Conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr is the target's name on the agent, the client on the server.
func (c *Conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline implements net.Conn.
func (c *Conn) SetDeadline(t time.Time) error {
	c.read.deadline.set(t)
	c.write.deadline.set(t)
	return nil
}

// SetReadDeadline implements net.Conn. A WriteTo that waits already is not
// interrupted.
func (c *Conn) SetReadDeadline(t time.Time) error {
	c.read.deadline.set(t)
	return nil
}

// SetWriteDeadline implements net.Conn. It does not bound ReadFrom.
func (c *Conn) SetWriteDeadline(t time.Time) error {
	c.write.deadline.set(t)
	return nil
}

// fail ends the stream with err, unless it is over already, and returns why it
// is over.
func (c *Conn) fail(err error) error {
	c.cancel(err)
	return context.Cause(c.ctx)
}

// Abort implements dial.Conn: the far side sees a reset. Bytes on their way are
// dropped.
func (c *Conn) Abort(cause error) {
	c.once.Do(func() { close(c.closed) })
	c.cancel(&abortError{cause})
}

// Close implements net.Conn. After both directions have ended it waits, at most
// closeWait, until the far side has confirmed that all was passed on; an error
// says that it did not. Otherwise it ends this side's direction and returns;
// the stream then lives on for at most closeWait, until the far side ends too,
// and is reset when that sends bytes that nobody can read any more.
func (c *Conn) Close() error {
	first := false
	c.once.Do(func() { first = true; close(c.closed) })
	switch {
	case !first:
		return net.ErrClosed
	case c.ctx.Err() != nil:
		return c.outcome()
	case c.endedLocal.Load() && c.endedRemote.Load():
		return c.confirm()
	}
	go c.linger()
	return nil
}

// confirm ends a stream whose directions have both ended.
func (c *Conn) confirm() error {
	if c.agent == nil {
		return c.end()
	}
	timer := time.NewTimer(closeWait)
	defer timer.Stop()
	select {
	case <-c.ctx.Done():
	case <-timer.C:
		_ = c.fail(errUnconfirmed)
	}
	return c.outcome()
}

// end is the clean end of a stream.
func (c *Conn) end() error {
	c.cancel(errClean)
	return c.outcome()
}

// outcome is how a stream ended: nil if cleanly, or by our own Abort.
func (c *Conn) outcome() error {
	err := context.Cause(c.ctx)
	var abort *abortError
	if errors.Is(err, errClean) || errors.As(err, &abort) {
		return nil
	}
	return err
}

// result is how a stream that is over ended: nil if cleanly.
func (c *Conn) result() error {
	if err := context.Cause(c.ctx); !errors.Is(err, errClean) {
		return err
	}
	return nil
}

// linger finishes a stream that was closed before both directions had ended.
func (c *Conn) linger() {
	timer := time.AfterFunc(closeWait, func() { _ = c.fail(errUnconfirmed) })
	defer timer.Stop()
	if err := c.endWrite(); err != nil {
		return
	}
	switch m, err := c.next(); {
	case err == nil:
		m.Free()
		_ = c.fail(errUnread)
	case errors.Is(err, errEnd):
		_ = c.confirm()
	}
}

// next receives once more after Close, whoever received before.
func (c *Conn) next() (mem.BufferSlice, error) {
	if err := c.read.gate.lockUntil(c.ctx); err != nil {
		return nil, err
	}
	defer c.read.gate.unlock()
	if c.read.receiving != nil {
		select {
		case <-c.read.receiving:
			c.takeReceived()
		case <-c.ctx.Done():
			return nil, context.Cause(c.ctx)
		}
	}
	return c.nextMessage()
}

// gate is a lock that can be waited for together with other things.
type gate chan struct{}

func (g gate) unlock() { <-g }

func (g gate) tryLock() bool {
	select {
	case g <- struct{}{}:
		return true
	default:
		return false
	}
}

func (g gate) lockUntil(ctx context.Context) error {
	select {
	case g <- struct{}{}:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}
