package tunnel

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// reset makes the kernel send a RST.
func reset(t testing.TB, c *net.TCPConn) {
	t.Helper()
	if err := c.SetLinger(0); err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
}

// wantReset reads until c's end, which must be a reset.
func wantReset(t testing.TB, who string, c net.Conn) {
	t.Helper()
	_ = c.SetReadDeadline(time.Now().Add(patience))
	if _, err := io.Copy(io.Discard, c); !isReset(err) {
		t.Fatalf("%s: connection ended with %v, want a reset", who, err)
	}
}

// A reset of either end, in every state of the connection, is a reset at the
// other one, soon and without anybody having to send first.
func TestReset_BothWays(t *testing.T) {
	states := map[string]func(t *testing.T, client, far *net.TCPConn){
		"idle": func(t *testing.T, client, far *net.TCPConn) {},
		"after_traffic": func(t *testing.T, client, far *net.TCPConn) {
			exchange(t, client, far)
			exchange(t, far, client)
		},
		"client_ended": func(t *testing.T, client, far *net.TCPConn) { endOne(t, client, far) },
		"target_ended": func(t *testing.T, client, far *net.TCPConn) { endOne(t, far, client) },
	}
	for name, prepare := range states {
		for _, byClient := range []bool{true, false} {
			who := map[bool]string{true: "/reset_by_client", false: "/reset_by_target"}[byClient]
			t.Run(name+who, func(t *testing.T) {
				g := newTarget(t)
				b := newBench(t, g.dial, setup{})
				client, piped := b.open()
				far := g.accept()
				prepare(t, client, far)
				if byClient {
					reset(t, client)
					wantEnd(t, "target", far, name == "client_ended")
				} else {
					reset(t, far)
					wantEnd(t, "client", client, name == "target_ended")
				}
				if r := receive(t, piped, "the pipe's end"); r.Err == nil {
					t.Fatal("the agent's pipe ended cleanly")
				}
			})
		}
	}
}

// wantEnd waits for the reset of c. Where the direction towards c has ended,
// reading cannot show it, and only sending does.
func wantEnd(t *testing.T, who string, c *net.TCPConn, endedBefore bool) {
	t.Helper()
	if !endedBefore {
		wantReset(t, who, c)
		return
	}
	_ = c.SetWriteDeadline(time.Now().Add(patience))
	if _, err := io.Copy(struct{ io.Writer }{c}, endless{}); !errors.Is(err, syscall.EPIPE) && !isReset(err) {
		t.Fatalf("%s: sending failed with %v, want EPIPE or a reset", who, err)
	}
}

func exchange(t *testing.T, from, to *net.TCPConn) {
	t.Helper()
	write(t, from, []byte("hello"))
	if _, err := io.ReadFull(to, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
}

func endOne(t *testing.T, from, to *net.TCPConn) {
	t.Helper()
	closeWrite(t, from)
	_ = to.SetReadDeadline(time.Now().Add(patience))
	if n, err := to.Read(make([]byte, 1)); n != 0 || !isEnd(err) {
		t.Fatalf("read %d, %v; want io.EOF", n, err)
	}
}

// A RST whose error a write has taken already reads as an end; it must not
// become one.
func TestReset_ErrorTakenByTheOtherDirection(t *testing.T) {
	agent, server, stop := connPair(t)
	defer stop()
	client, local := tcpPair(t)
	reset(t, client)
	eventually(t, "the reset", func() bool {
		_, err := local.Write([]byte("x"))
		return err != nil
	})
	if n, err := local.Read(make([]byte, 1)); n != 0 || !isEnd(err) {
		t.Fatalf("the kernel says %d, %v; this test needs an end", n, err)
	}
	for name, c := range map[string]*Conn{"agent": agent, "server": server} {
		if _, err := c.ReadFrom(local); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("%s: ReadFrom ended with %v, want a reset", name, err)
		}
	}
}

// What the server's dial says reaches the agent as the same sentinel, and the
// client as a reset, whichever way the agent uses the connection.
func TestDial_Results(t *testing.T) {
	for _, sentinel := range []error{
		dial.ErrRefused, dial.ErrDenied, dial.ErrUnreachable, dial.ErrTimeout,
		dial.ErrNoUpstream, dial.ErrLimit, dial.ErrLost,
	} {
		t.Run(label(sentinel), func(t *testing.T) {
			b := newBench(t, func(context.Context, dial.Target) (dial.Conn, error) {
				return nil, errors.Join(errors.New("10.0.0.1:6443"), sentinel)
			}, setup{})
			uses := map[string]func(dial.Conn) error{
				"Read":     func(c dial.Conn) error { _, err := c.Read(make([]byte, 1)); return err },
				"WriteTo":  func(c dial.Conn) error { _, err := c.(*Conn).WriteTo(io.Discard); return err },
				"ReadFrom": func(c dial.Conn) error { _, err := c.(*Conn).ReadFrom(endless{}); return err },
				"Write": func(c dial.Conn) (err error) {
					for err == nil {
						_, err = c.Write([]byte("x"))
					}
					return err
				},
			}
			for name, use := range uses {
				c, err := b.links.Dial(t.Context(), kas())
				if err != nil {
					t.Fatal(err)
				}
				if err := use(c); !errors.Is(err, sentinel) {
					t.Errorf("%s: %v, want %v", name, err, sentinel)
				}
				c.Abort(nil)
			}
			client, piped := b.open()
			wantReset(t, "client", client)
			if r := receive(t, piped, "the pipe's end"); !errors.Is(r.Err, sentinel) {
				t.Errorf("Pipe: %v, want %v", r.Err, sentinel)
			}
			want := float64(len(uses) + 1)
			eventually(t, "metrics of both sides", func() bool {
				return value(t, b.agentReg, "kasway_agent_streams_ended_total", label(sentinel)) == want &&
					value(t, b.serverReg, "kasway_server_streams_ended_total", label(sentinel)) == want
			})
		})
	}
}

// endless never ends.
type endless struct{}

func (endless) Read(p []byte) (int, error) { return len(p), nil }

// A denial does not tell the denied more than that.
func TestDial_DenialTellsNothing(t *testing.T) {
	const secret = "rule 7 of the policy"
	b := newBench(t, func(context.Context, dial.Target) (dial.Conn, error) {
		return nil, errors.Join(dial.ErrDenied, errors.New(secret))
	}, setup{})
	c, err := b.links.Dial(t.Context(), kas())
	if err != nil {
		t.Fatal(err)
	}
	_, err = c.Read(make([]byte, 1))
	if !errors.Is(err, dial.ErrDenied) || contains(err.Error(), secret) {
		t.Fatalf("got %v", err)
	}
}

// A client that gives up while the server dials ends the dialling.
func TestDial_ClientGivesUp(t *testing.T) {
	dialling, ended := make(chan struct{}), make(chan error, 1)
	b := newBench(t, func(ctx context.Context, _ dial.Target) (dial.Conn, error) {
		close(dialling)
		<-ctx.Done()
		ended <- ctx.Err()
		return nil, ctx.Err()
	}, setup{})
	client, piped := b.open()
	write(t, client, []byte("request"))
	receive(t, dialling, "the dial")
	reset(t, client)
	if err := receive(t, ended, "the end of the dial's context"); !errors.Is(err, context.Canceled) {
		t.Fatal(err)
	}
	receive(t, piped, "the pipe's end")
	eventually(t, "the server's stream ends as reset", func() bool {
		return value(t, b.serverReg, "kasway_server_streams_ended_total", "reset") == 1
	})
}

// Once dialled, the context of Dial has no say any more, on both sides.
func TestDial_ContextBoundsDiallingAlone(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	ctx, cancel := context.WithCancel(context.Background())
	c, err := b.links.Dial(ctx, kas())
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	far := g.accept()
	write(t, c, []byte("hello"))
	if _, err := io.ReadFull(far, make([]byte, 5)); err != nil {
		t.Fatal(err)
	}
	c.Abort(nil)
	if _, err := b.links.Dial(ctx, kas()); !errors.Is(err, context.Canceled) && !errors.Is(err, dial.ErrLost) {
		t.Fatalf("Dial with a context that had ended: %v", err)
	}
}

// A cut link resets every connection on it, at both ends, never a clean end.
func TestLink_LostMidStream(t *testing.T) {
	var cut cutter
	g := newTarget(t)
	b := newBench(t, g.dial, setup{links: func(c *LinksConfig) { c.DialContext = cut.dial }})
	type carried struct {
		client, far *net.TCPConn
		piped       <-chan dial.Result
	}
	var all []carried
	for range 20 {
		client, piped := b.open()
		far := g.accept()
		exchange(t, client, far)
		all = append(all, carried{client, far, piped})
	}
	// One client reads nothing at all: its agent is stuck writing to it.
	stalled := all[0]
	go func() { _, _ = io.Copy(stalled.far, endless{}) }()
	start := time.Now()
	cut.now()
	for i, c := range all {
		if i > 0 {
			wantReset(t, "client", c.client)
			wantReset(t, "target", c.far)
		}
		if r := receive(t, c.piped, "the pipe's end"); !errors.Is(r.Err, dial.ErrLost) {
			t.Fatalf("pipe: %v, want ErrLost", r.Err)
		}
	}
	if d := time.Since(start); d > time.Second {
		t.Errorf("the last reset came %v after the cut", d)
	}
	waitUp(t, b.links)
	if n := value(t, b.agentReg, "kasway_agent_link_reconnects_total", ""); n != 1 {
		t.Errorf("%v reconnects counted", n)
	}
}

// A server that stops is a lost link to everybody.
func TestServer_StopMidStream(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	client, piped := b.open()
	far := g.accept()
	exchange(t, client, far)
	b.server.Stop()
	wantReset(t, "client", client)
	wantReset(t, "target", far)
	if r := receive(t, piped, "the pipe's end"); !errors.Is(r.Err, dial.ErrLost) {
		t.Fatal(r.Err)
	}
}

// An agent that stops resets what it carries.
func TestLinks_StopMidStream(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	client, piped := b.open()
	far := g.accept()
	exchange(t, client, far)
	b.stopLinks()
	wantReset(t, "client", client)
	wantReset(t, "target", far)
	receive(t, piped, "the pipe's end")
	if _, err := b.links.Dial(t.Context(), kas()); !errors.Is(err, dial.ErrNoLink) {
		t.Fatalf("Dial after the end: %v", err)
	}
}

// cutter makes links whose TCP connections can be killed.
type cutter struct {
	mu    sync.Mutex
	conns []*net.TCPConn
}

func (c *cutter) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err == nil {
		c.mu.Lock()
		defer c.mu.Unlock()
		c.conns = append(c.conns, conn.(*net.TCPConn))
	}
	return conn, err
}

// now kills the connections made so far.
func (c *cutter) now() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, conn := range c.conns {
		_ = conn.SetLinger(0)
		_ = conn.Close()
	}
	c.conns = nil
}
