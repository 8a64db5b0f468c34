package dial

import (
	"context"
	"net"
	"sync"
)

// TCP makes a Conn of a TCP connection: Abort becomes a RST on the wire.
type TCP struct {
	*net.TCPConn
	once sync.Once
}

// NewTCP takes ownership of c.
//
// The socket is left such that the kernel resets it if this process is killed:
// the peer must not take a cut for an end.
func NewTCP(c *net.TCPConn) *TCP {
	_ = c.SetLinger(0) // fails only on a connection that is closed already
	return &TCP{TCPConn: c}
}

// Abort implements Conn. Unread and unsent bytes are dropped.
func (c *TCP) Abort(error) {
	c.once.Do(func() { _ = c.TCPConn.Close() })
}

// Close implements net.Conn: queued bytes are still delivered.
func (c *TCP) Close() error {
	var err error = net.ErrClosed
	c.once.Do(func() {
		_ = c.SetLinger(-1)
		err = c.TCPConn.Close()
	})
	return err
}

// Direct dials the address in Target.Name ("host:port", the host resolved by
// d's resolver). It is the last link of the server's chain; guards in front of
// it decide which names may come this far.
func Direct(d *net.Dialer) Func {
	return func(ctx context.Context, t Target) (Conn, error) {
		c, err := d.DialContext(ctx, "tcp", t.Name)
		if err != nil {
			return nil, Classify(err)
		}
		return NewTCP(c.(*net.TCPConn)), nil
	}
}
