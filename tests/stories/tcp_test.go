package stories

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// accepts listens at addresses of h for as long as the test runs, and hands out
// what it accepts; whatever is not taken is closed at the end.
func accepts(t *testing.T, h *netns.Host, at ...netip.AddrPort) <-chan *net.TCPConn {
	t.Helper()
	conns := make(chan *net.TCPConn, 256)
	for _, a := range at {
		l, err := h.Listen("tcp", a.String())
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan struct{})
		go func() {
			defer close(done)
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				conns <- c.(*net.TCPConn)
			}
		}()
		t.Cleanup(func() {
			l.Close()
			<-done
		})
	}
	t.Cleanup(func() {
		for len(conns) > 0 {
			shut((<-conns))
		}
	})
	return conns
}

// shut closes connections whose end is no part of the story.
func shut(all ...io.Closer) {
	for _, c := range all {
		_ = c.Close()
	}
}

// next waits for a connection.
func next(t *testing.T, conns <-chan *net.TCPConn) *net.TCPConn {
	t.Helper()
	select {
	case c := <-conns:
		t.Cleanup(func() { shut(c) })
		deadline(t, c, patience)
		return c
	case <-time.After(patience):
		t.Fatal("no connection arrives at the far side")
		return nil
	}
}

// saying waits for a connection that says word; those that say nothing, as the
// server's probes do, are passed over.
func saying(t *testing.T, conns <-chan *net.TCPConn, word string) *net.TCPConn {
	t.Helper()
	for {
		c := next(t, conns)
		got := make([]byte, len(word))
		if _, err := io.ReadFull(c, got); err == nil && string(got) == word {
			return c
		}
		shut(c)
	}
}

// connect connects from h, and gives every read and write patience.
func connect(t *testing.T, h *netns.Host, to netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := dial(t, h, to)
	if err != nil {
		t.Fatalf("%s to %s: %v", h.Label, to, err)
	}
	return c
}

func dial(t *testing.T, h *netns.Host, to netip.AddrPort) (*net.TCPConn, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	t.Cleanup(func() { c.Close() })
	deadline(t, c, patience)
	return c.(*net.TCPConn), nil
}

func deadline(t *testing.T, c net.Conn, d time.Duration) {
	t.Helper()
	if err := c.SetDeadline(time.Now().Add(d)); err != nil {
		t.Fatal(err)
	}
}

// pair is a client of the target "raw" and the far side's end of it, after each
// has heard the other.
func pair(t *testing.T, h *netns.Host, to netip.AddrPort, far <-chan *net.TCPConn) (client, server *net.TCPConn) {
	t.Helper()
	client = connect(t, h, to)
	greet(t, client, "ping")
	server = saying(t, far, "ping")
	greet(t, server, "pong")
	hear(t, client, "pong")
	return client, server
}

func greet(t *testing.T, c net.Conn, word string) {
	t.Helper()
	if _, err := c.Write([]byte(word)); err != nil {
		t.Fatal(err)
	}
}

func hear(t *testing.T, c net.Conn, word string) {
	t.Helper()
	got := make([]byte, len(word))
	for n := 0; n < len(got); {
		m, err := c.Read(got[n:])
		if err != nil {
			t.Fatalf("waiting for %q: %v", word, err)
		}
		n += m
	}
	if string(got) != word {
		t.Fatalf("heard %q, want %q", got, word)
	}
}

// isReset fails the test unless c was, or within the time is, ended by a reset.
func isReset(t *testing.T, what string, c net.Conn, within time.Duration) {
	t.Helper()
	deadline(t, c, within)
	n, err := c.Read(make([]byte, 1))
	if n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%s: read gives %d bytes and %v, want a reset", what, n, err)
	}
}

// isCut fails the test unless a connection from h is reset at once: during
// connect, or by the time the first byte is waited for.
func isCut(t *testing.T, what string, h *netns.Host, to netip.AddrPort) {
	t.Helper()
	c, err := dial(t, h, to)
	if errors.Is(err, syscall.ECONNRESET) {
		return
	}
	if err != nil {
		t.Errorf("%s: %v, want a reset", what, err)
		return
	}
	isReset(t, what, c, 2*time.Second)
	shut(c)
}

func reset(t *testing.T, c *net.TCPConn) {
	t.Helper()
	if err := errors.Join(c.SetLinger(0), c.Close()); err != nil {
		t.Fatal(err)
	}
}
