package tunnel

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// 1000 connections come and go, some cleanly, some by resets of either side,
// some refused; afterwards there are as many descriptors and goroutines as
// before, and no stream is counted.
func TestChurn_LeavesNothing(t *testing.T) {
	b := newBench(t, echo(t), setup{})
	roundOf := func(n int) {
		var wg sync.WaitGroup
		for i := range n {
			wg.Go(func() { b.visit(i) })
		}
		wg.Wait()
	}
	roundOf(20) // pools and caches fill
	settle := func() (int, int) { return descriptors(t), runtime.NumGoroutine() }
	var fds, goroutines int
	eventually(t, "no stream left", func() bool { return b.idle() })
	eventually(t, "a stable base", func() bool {
		a, c := settle()
		same := a == fds && c == goroutines
		fds, goroutines = a, c
		return same
	})
	for range 20 {
		roundOf(50)
	}
	eventually(t, "no stream left", func() bool { return b.idle() })
	eventually(t, "descriptors and goroutines are back", func() bool {
		a, c := settle()
		return a <= fds && c <= goroutines
	})
}

// visit is one connection of the churn.
func (b *bench) visit(i int) {
	client, local := tcpPair(b.t)
	defer func() { _ = client.Close() }()
	target := kas()
	if i%5 == 4 {
		target.Name = "refused"
	}
	c, err := b.links.Dial(b.t.Context(), target)
	if err != nil {
		b.t.Error(err)
		return
	}
	done := make(chan struct{})
	go func() { defer close(done); dial.Pipe(dial.NewTCP(local), c) }()
	_ = client.SetDeadline(time.Now().Add(patience))
	want := randomBytes(1 + i*97)
	_, _ = client.Write(want) // a refused one may fail already
	switch {
	case i%5 == 0: // cleanly
		_ = client.CloseWrite()
		got, err := io.ReadAll(client)
		if err != nil || !bytes.Equal(got, want) {
			b.t.Errorf("echo of %d bytes: %d, %v", len(want), len(got), err)
		}
	case i%5 == 1: // reset in the middle
		_ = client.SetLinger(0)
	case i%5 == 4:
		if _, err := io.ReadAll(client); !isReset(err) {
			b.t.Errorf("refused: %v", err)
		}
	default: // read some, then leave
		_, _ = io.ReadFull(client, make([]byte, len(want)/2))
	}
	_ = client.Close()
	<-done
}

// echo serves every dial but those of the target "refused" with an echo.
func echo(t testing.TB) dial.Func {
	return func(_ context.Context, target dial.Target) (dial.Conn, error) {
		if target.Name == "refused" {
			return nil, dial.ErrRefused
		}
		near, far := tcpPair(t)
		go func() {
			defer func() { _ = far.Close() }()
			_, _ = io.Copy(far, far)
		}()
		return dial.NewTCP(near), nil
	}
}

func (b *bench) idle() bool {
	return value(b.t, b.agentReg, "kasway_agent_streams_active", "") == 0 &&
		value(b.t, b.serverReg, "kasway_server_streams_active", "") == 0 &&
		b.server.streams.Load() == 0
}

func descriptors(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// Streams above a limit are answered LIMIT, and room comes back.
func TestServer_Limits(t *testing.T) {
	for name, limits := range map[string]Limits{"link": {StreamsPerLink: 3}, "server": {Streams: 3}} {
		t.Run(name, func(t *testing.T) {
			g := newTarget(t)
			b := newBench(t, g.dial, setup{server: func(c *ServerConfig) { c.Limits = limits }})
			var conns []dial.Conn
			for range 3 {
				c, err := b.links.Dial(t.Context(), kas())
				if err != nil {
					t.Fatal(err)
				}
				write(t, c, []byte("x"))
				g.accept()
				conns = append(conns, c)
			}
			over, err := b.links.Dial(t.Context(), kas())
			if err != nil {
				t.Fatal(err)
			}
			if _, err := over.Read(make([]byte, 1)); !errors.Is(err, dial.ErrLimit) {
				t.Fatalf("above the limit: %v", err)
			}
			conns[0].Abort(nil)
			eventually(t, "room again", func() bool { return b.server.streams.Load() == 2 })
			c, err := b.links.Dial(t.Context(), kas())
			if err != nil {
				t.Fatal(err)
			}
			g.accept()
			for _, c := range append(conns, c) {
				c.Abort(nil)
			}
		})
	}
}

// One reader that stalls for ever stops only itself.
func TestLink_StalledReader(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	var stalled []io.Closer
	for range 10 {
		client, _ := b.open()
		far := g.accept()
		go func() { _, _ = io.Copy(far, endless{}) }()
		stalled = append(stalled, client, far)
	}
	for range 5 {
		client, _ := b.open()
		far := g.accept()
		want := randomBytes(3 << 20)
		go func() {
			_, _ = far.Write(want)
			_ = far.CloseWrite()
		}()
		if got := readAll(t, client); !bytes.Equal(got, want) {
			t.Fatal("beside stalled readers bytes were lost")
		}
		_ = client.Close()
	}
	for _, c := range stalled {
		_ = c.Close()
	}
}

// Random programs of sends, ends, resets and reads run on both faces of a
// stream at once. A model of TCP says what each side may see: a prefix of what
// the other sent; all of it before a clean end; an end only after the other
// ended; a failure only after a reset.
func TestConn_RandomInterleavings(t *testing.T) {
	runs := 150
	if testing.Short() {
		runs = 30
	}
	conns := make(chan *net.TCPConn, 1)
	b := newBench(t, func(context.Context, dial.Target) (dial.Conn, error) {
		near, far := tcpPair(t)
		conns <- far
		return dial.NewTCP(near), nil
	}, setup{})
	for i := range runs {
		seed := rand.Uint64()
		t.Run(fmt.Sprintf("%d_seed_%x", i, seed), func(t *testing.T) {
			rnd := rand.New(rand.NewPCG(seed, 0))
			client, local := tcpPair(t)
			c, err := b.links.Dial(t.Context(), kas())
			if err != nil {
				t.Fatal(err)
			}
			piped := make(chan struct{})
			go func() { defer close(piped); dial.Pipe(dial.NewTCP(local), c) }()
			far := receive(t, conns, "the dial")
			a, z := newActor(rnd, client), newActor(rnd, far)
			var wg sync.WaitGroup
			wg.Go(a.send)
			wg.Go(a.receive)
			wg.Go(z.send)
			wg.Go(z.receive)
			wg.Wait()
			receive(t, piped, "the pipe's end")
			a.check(t, "client", z)
			z.check(t, "target", a)
		})
	}
	eventually(t, "no stream left", func() bool { return b.idle() })
}
