package tunnel

import (
	"bytes"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

func randomBytes(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{}).Read(b)
	return b
}

// Either side ends its direction first, the other then sends 5 MB and ends: all
// of it arrives, and both sides see clean ends.
func TestCase_B16_HalfClose(t *testing.T) {
	for name, clientFirst := range map[string]bool{"client_ends_first": true, "target_ends_first": false} {
		t.Run(name, func(t *testing.T) {
			g := newTarget(t)
			b := newBench(t, g.dial, setup{})
			client, piped := b.open()
			far := g.accept()
			_ = far.SetDeadline(time.Now().Add(patience))
			first, second := client, far
			if !clientFirst {
				first, second = far, client
			}
			write(t, first, []byte("request"))
			closeWrite(t, first)
			if got := readAll(t, second); string(got) != "request" {
				t.Fatalf("got %q before the end", got)
			}
			want := randomBytes(5 << 20)
			go func() {
				_, _ = second.Write(want)
				_ = second.CloseWrite()
			}()
			if got := readAll(t, first); !bytes.Equal(got, want) {
				t.Fatalf("after its end it got %d bytes, want %d, or others", len(got), len(want))
			}
			if r := receive(t, piped, "the pipe's end"); r.Err != nil {
				t.Fatalf("agent's pipe: %v", r.Err)
			}
			eventually(t, "a clean end on the server", func() bool {
				return value(t, b.serverReg, "kasway_server_streams_ended_total", "ok") == 1
			})
			if n := value(t, b.agentReg, "kasway_agent_streams_ended_total", "ok"); n != 1 {
				t.Fatalf("the agent counts %v clean ends", n)
			}
		})
	}
}

// Both directions end at once, without any byte.
func TestCase_B16_BothEndAtOnce(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	for range 50 {
		client, piped := b.open()
		far := g.accept()
		go func() { _ = far.CloseWrite() }()
		closeWrite(t, client)
		if got, err := io.ReadAll(client); len(got) != 0 || err != nil {
			t.Fatalf("client got %q, %v; the pipe says %v", got, err, receive(t, piped, "the pipe's end").Err)
		}
		if got := readAll(t, far); len(got) != 0 {
			t.Fatalf("target got %q", got)
		}
		if r := receive(t, piped, "the pipe's end"); r.Err != nil {
			t.Fatal(r.Err)
		}
	}
}

// A direction that has ended takes no more bytes; the other one does.
func TestConn_WriteAfterCloseWrite(t *testing.T) {
	agent, server, stop := connPair(t)
	defer stop()
	for _, ends := range [][2]*Conn{{agent, server}, {server, agent}} {
		from, to := ends[0], ends[1]
		if err := from.CloseWrite(); err != nil {
			t.Fatal(err)
		}
		if _, err := from.Write([]byte("x")); err == nil {
			t.Fatal("Write after CloseWrite succeeded")
		}
		if _, err := from.ReadFrom(bytes.NewReader([]byte("x"))); err == nil {
			t.Fatal("ReadFrom after CloseWrite succeeded")
		}
		if err := from.CloseWrite(); err != nil {
			t.Fatalf("second CloseWrite: %v", err)
		}
		if n, err := to.Read(make([]byte, 1)); n != 0 || !isEnd(err) {
			t.Fatalf("far side read %d, %v; want io.EOF", n, err)
		}
	}
}

// A Write of nothing must not travel: an empty message is the end.
func TestConn_EmptyWriteIsNoEnd(t *testing.T) {
	agent, server, stop := connPair(t)
	defer stop()
	if n, err := agent.Write(nil); n != 0 || err != nil {
		t.Fatal(n, err)
	}
	if _, err := agent.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	got := make([]byte, 1)
	if _, err := io.ReadFull(server, got); err != nil || got[0] != 'x' {
		t.Fatalf("got %q, %v", got, err)
	}
}

// Read and WriteTo may take turns, within one message.
func TestConn_ReadThenWriteTo(t *testing.T) {
	agent, server, stop := connPair(t)
	defer stop()
	want := randomBytes(300_000)
	go func() {
		_, _ = server.ReadFrom(bytes.NewReader(want))
		_ = server.CloseWrite()
	}()
	head := make([]byte, 12_345)
	if _, err := io.ReadFull(agent, head); err != nil {
		t.Fatal(err)
	}
	var rest bytes.Buffer
	n, err := agent.WriteTo(&rest)
	if err != nil || n != int64(rest.Len()) {
		t.Fatal(n, err)
	}
	if !bytes.Equal(append(head, rest.Bytes()...), want) {
		t.Fatal("bytes lost or changed between Read and WriteTo")
	}
}

// Close after both ends waits for the server's word.
func TestConn_CloseWaitsForTheFarSide(t *testing.T) {
	release := make(chan struct{})
	b := newBench(t, stuckTarget(release), setup{})
	c, err := b.links.Dial(t.Context(), kas())
	if err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !isEnd(err) {
		t.Fatal(err)
	}
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	select {
	case err := <-closed:
		t.Fatalf("Close did not wait: %v", err)
	case <-time.After(100 * time.Millisecond): // it can only be too short to notice, never fail wrongly
	}
	close(release)
	if err := receive(t, closed, "Close's return"); err != nil {
		t.Fatal(err)
	}
}

// stuckTarget ends its direction at once and takes its time to take an end.
func stuckTarget(release chan struct{}) dial.Func {
	return dialTo(func(dial.Target) dial.Conn { return &stuck{Conn: newMemConn(), release: release} })
}

type stuck struct {
	dial.Conn
	release chan struct{}
}

func (s *stuck) Read([]byte) (int, error) { return 0, io.EOF }
func (s *stuck) CloseWrite() error        { <-s.release; return nil }

func write(t testing.TB, c net.Conn, p []byte) {
	t.Helper()
	if _, err := c.Write(p); err != nil {
		t.Fatalf("write: %v", err)
	}
}

func closeWrite(t testing.TB, c interface{ CloseWrite() error }) {
	t.Helper()
	if err := c.CloseWrite(); err != nil {
		t.Fatalf("CloseWrite: %v", err)
	}
}

func readAll(t testing.TB, r io.Reader) []byte {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return b
}

// The end of a direction stays what every later read gets, also after the
// stream is over: how soon that is depends on the far side alone.
func TestConn_EndStaysTheEnd(t *testing.T) {
	for range 50 {
		agent, server, stop := connPair(t)
		for _, c := range []*Conn{server, agent} {
			if err := c.CloseWrite(); err != nil {
				t.Fatal(err)
			}
		}
		closed := make(chan error, 1)
		go func() {
			_, err := io.ReadAll(server)
			closed <- errors.Join(err, server.Close())
		}()
		for range 20 {
			if n, err := agent.Read(make([]byte, 1)); n != 0 || !isEnd(err) {
				t.Fatalf("read %d, %v; want io.EOF", n, err)
			}
		}
		if err := receive(t, closed, "the server's end"); err != nil {
			t.Fatal(err)
		}
		<-agent.ctx.Done()
		for range 20 {
			if n, err := agent.Read(make([]byte, 1)); n != 0 || !isEnd(err) {
				t.Fatalf("after the stream's end read %d, %v; want io.EOF", n, err)
			}
			if n, err := agent.WriteTo(io.Discard); n != 0 || err != nil {
				t.Fatalf("after the stream's end WriteTo gave %d, %v; want a clean end", n, err)
			}
		}
		stop()
	}
}
