package bed

import (
	"context"
	"net"
	"runtime"

	"github.com/vishvananda/netns"
)

// dialIn dials a literal address from inside a namespace.
func dialIn(ctx context.Context, ns, network, addr string) (net.Conn, error) {
	type result struct {
		c   net.Conn
		err error
	}
	done := make(chan result, 1)
	go func() {
		// Never unlocked: the thread has changed, and ends with the goroutine.
		runtime.LockOSThread()
		c, err := dialHere(ctx, ns, network, addr)
		done <- result{c, err}
	}()
	r := <-done
	return r.c, r.err
}

func dialHere(ctx context.Context, ns, network, addr string) (net.Conn, error) {
	h, err := netns.GetFromName(ns)
	if err != nil {
		return nil, err
	}
	defer func() { _ = h.Close() }()
	if err := netns.Set(h); err != nil {
		return nil, err
	}
	// A literal address is dialled by the calling goroutine itself.
	return (&net.Dialer{}).DialContext(ctx, network, addr)
}
