package tunnel

import (
	"context"
	"io"
	"net"
	"sync"
	"testing"
	"time"
)

// The client's first bytes reach the target in the flight that also opens the
// stream: while nothing at all comes back from the server, the target has the
// request already. An agent that waited for the dial result would need one more
// round trip, and stand still here.
func TestDial_Optimistic(t *testing.T) {
	var back valve
	g := newTarget(t)
	b := newBench(t, g.dial, setup{links: func(c *LinksConfig) { c.DialContext = back.dial }})
	back.shut()
	client, _ := b.open()
	write(t, client, []byte("request"))
	far := g.accept()
	_ = far.SetDeadline(time.Now().Add(patience))
	got := make([]byte, 7)
	if _, err := io.ReadFull(far, got); err != nil || string(got) != "request" {
		t.Fatalf("first flight: target got %q, %v", got, err)
	}
	write(t, far, []byte("response"))
	back.open()
	got = make([]byte, 8)
	if _, err := io.ReadFull(client, got); err != nil || string(got) != "response" {
		t.Fatalf("second flight: client got %q, %v", got, err)
	}
}

// valve makes links on which what the server sends can be held back.
type valve struct {
	mu   sync.Mutex
	gate chan struct{} // closed while open; nil before it was first shut
}

func (v *valve) shut() { v.mu.Lock(); defer v.mu.Unlock(); v.gate = make(chan struct{}) }
func (v *valve) open() { v.mu.Lock(); defer v.mu.Unlock(); close(v.gate) }

func (v *valve) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	c, err := new(net.Dialer).DialContext(ctx, network, addr)
	return &valved{c, v}, err
}

type valved struct {
	net.Conn
	v *valve
}

func (c *valved) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.v.mu.Lock()
	gate := c.v.gate
	c.v.mu.Unlock()
	if gate != nil {
		<-gate
	}
	return n, err
}
