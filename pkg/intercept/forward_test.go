package intercept

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/kasway/kasway/pkg/dial"
)

// story is a Forwarder behind a listener, and in front of a far side that the
// test plays.
type story struct {
	*rig
	gates *Gates
	conns *Conns
	// forwarded is what the Forwarder logs.
	forwarded *logtest.Hook
	far       chan *net.TCPConn // what the far side's end of each dialled connection
	got       chan dial.Target
}

// tell makes a story; fake, if given, is what the dial function does instead.
func tell(t *testing.T, hold time.Duration, fake dial.Func) *story {
	t.Helper()
	return tellWho(t, nil, hold, fake)
}

// tellWho is tell with clients of whom something is known.
func tellWho(t *testing.T, who *Who, hold time.Duration, fake dial.Func) *story {
	t.Helper()
	m, v := metrics(t)
	s := &story{gates: NewGates(100, m), conns: NewConns(), far: make(chan *net.TCPConn, 100), got: make(chan dial.Target, 100)}
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	log, hook := logs(t)
	if fake == nil {
		direct := dial.Direct(&net.Dialer{})
		fake = func(ctx context.Context, to dial.Target) (dial.Conn, error) {
			s.got <- to
			to.Name = l.Addr().String()
			return direct(ctx, to)
		}
	}
	f := NewForwarder(ForwardConfig{Dial: fake, Gates: s.gates, Who: who, Conns: s.conns, Hold: hold, DialTimeout: 200 * time.Millisecond, Log: log, Metrics: m})
	s.rig = newRig(t, ServerConfig{Metrics: m, Handle: f.Handle, Admit: func(t *Taken) error { t.FromHost = true; return nil }})
	s.metrics, s.forwarded = v, hook
	s.gates.Set("kas", Open)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.AcceptTCP()
			if err != nil {
				return
			}
			s.far <- c
		}
	}()
	t.Cleanup(func() { shut(l); <-done })
	return s
}

// pair is a client's connection and the far side's end of it.
func (s *story) pair(t *testing.T) (client, far *net.TCPConn) {
	t.Helper()
	client = s.dial(t)
	far = <-s.far
	t.Cleanup(func() { shut(far) })
	if err := far.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return client, far
}

func send(t *testing.T, c io.Writer, text string) {
	t.Helper()
	if _, err := io.WriteString(c, text); err != nil {
		t.Error(err)
	}
}

// wantAll fails t unless everything until c's clean end is text.
func wantAll(t *testing.T, c io.Reader, text string) {
	t.Helper()
	if got, err := io.ReadAll(c); err != nil || string(got) != text {
		t.Errorf("read %q, %v, want %q and a clean end", got, err, text)
	}
}

func TestForwardHalfCloseBothWays(t *testing.T) {
	s := tell(t, 0, nil)
	for name, swap := range map[string]bool{"client ends first": false, "target ends first": true} {
		t.Run(name, func(t *testing.T) {
			a, b := s.pair(t)
			if swap {
				a, b = b, a
			}
			send(t, a, "question")
			if err := a.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			wantAll(t, b, "question")
			send(t, b, "a longer answer")
			if err := b.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			wantAll(t, a, "a longer answer")
		})
	}
	eventually(t, "bytes are counted", func() bool {
		return s.metrics.of("bytes_total to_target") == 23 && s.metrics.of("bytes_total to_client") == 23
	})
}

// A client may end its direction before it has said anything, and before the
// target is dialled.
func TestForwardSilentHalfClose(t *testing.T) {
	up, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	direct, ended := dial.Direct(&net.Dialer{}), make(chan struct{})
	s := tell(t, time.Second, func(ctx context.Context, to dial.Target) (dial.Conn, error) {
		<-ended
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-time.After(100 * time.Millisecond): // to no effect: nobody gave up
		}
		to.Name = up.Addr().String()
		return direct(ctx, to)
	})
	client := s.dial(t)
	if err := client.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	close(ended)
	wait := make(chan net.Conn, 1)
	go func() {
		defer close(wait)
		if far, err := up.Accept(); err == nil {
			wait <- far
		}
	}()
	select {
	case far := <-wait:
		wantAll(t, far, "")
		send(t, far, "greeting")
		far.Close()
		wantAll(t, client, "greeting")
	case <-time.After(10 * time.Second):
		t.Error("the client was taken for gone")
	}
	up.Close()
	<-wait
}

func TestForwardResetBothWays(t *testing.T) {
	s := tell(t, 0, nil)
	for name, swap := range map[string]bool{"by the client": false, "by the target": true} {
		t.Run(name, func(t *testing.T) {
			a, b := s.pair(t)
			if swap {
				a, b = b, a
			}
			send(t, a, "x")
			if _, err := b.Read(make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			dial.NewTCP(a).Abort(nil)
			wantReset(t, b)
		})
	}
}

func TestForwardSaysWhoAndWhere(t *testing.T) {
	s := tell(t, 0, nil)
	ids := map[string]bool{}
	for range 2 {
		client, _ := s.pair(t)
		got := <-s.got
		if got.Name != "kas" || got.Client != unmapped(client.LocalAddr()) || got.Pod || got.UIDKnown || len(got.ID) != 16 {
			t.Errorf("target %+v", got)
		}
		ids[got.ID] = true
	}
	if len(ids) != 2 {
		t.Error("two connections have one id")
	}
}

func TestForwardRefusals(t *testing.T) {
	for want, err := range map[string]error{
		"refused":     fmt.Errorf("server: %w", dial.ErrRefused),
		"denied":      dial.ErrDenied,
		"unreachable": syscall.ENETUNREACH,
		"limit":       dial.ErrLimit,
		"no_link":     dial.ErrNoLink,
		"no_upstream": dial.ErrNoUpstream,
		"other":       errors.New("unheard of"),
	} {
		t.Run(want, func(t *testing.T) {
			hold := time.Second
			if errors.Is(err, dial.ErrNoLink) || errors.Is(err, dial.ErrNoUpstream) {
				hold = 0 // these alone are worth another try
			}
			var dials atomic.Int64
			s := tell(t, hold, func(context.Context, dial.Target) (dial.Conn, error) {
				dials.Add(1)
				return nil, err
			})
			wantRefused(t, s.addr())
			if n := dials.Load(); n != 1 {
				t.Errorf("dialled %d times", n)
			}
			if s.metrics.of("refused_total "+want) != 1 {
				t.Error("not counted")
			}
		})
	}
}

// dead is a dial that ends only with its ctx.
func dead(ctx context.Context, _ dial.Target) (dial.Conn, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func TestForwardDialTimeout(t *testing.T) {
	s := tell(t, 0, dead)
	wantReset(t, s.dial(t))
	eventually(t, "it is counted", func() bool { return s.metrics.of("refused_total timeout") == 1 })
}

func TestForwardClientGivesUpWhileDialling(t *testing.T) {
	dialling, cancelled := make(chan struct{}), make(chan struct{})
	s := tell(t, 0, func(ctx context.Context, to dial.Target) (dial.Conn, error) {
		close(dialling)
		<-ctx.Done()
		close(cancelled)
		return nil, context.Cause(ctx)
	})
	c := s.dial(t)
	send(t, c, "unread bytes do not hide the reset")
	<-dialling
	dial.NewTCP(c).Abort(nil)
	<-cancelled
	eventually(t, "it is counted", func() bool { return s.metrics.of("refused_total client_gone") == 1 })
}

func TestForwardHeldThenServed(t *testing.T) {
	s := tell(t, 5*time.Second, nil)
	s.gates.Set("kas", Held)
	s.gates.over = 400 * time.Millisecond
	const n = 8
	var clients []*net.TCPConn
	for i := range n {
		c := s.dial(t)
		send(t, c, fmt.Sprint(i))
		clients = append(clients, c)
		eventually(t, "it is held", func() bool { return s.metrics.of("held") == float64(i+1) })
	}
	opened := time.Now()
	s.gates.Set("kas", Open)
	for i := range n {
		far := <-s.far
		defer shut(far)
		if got := string(readN(t, far, 1)); got != fmt.Sprint(i) {
			t.Errorf("%d. served is client %s", i, got)
		}
	}
	if took := time.Since(opened); took < 300*time.Millisecond {
		t.Errorf("all were let go within %v", took)
	}
	for _, c := range clients {
		shut(c)
	}
}

func readN(t *testing.T, c net.Conn, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	if err := c.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(c, b); err != nil {
		t.Fatal(err)
	}
	return b
}

func TestForwardHeldTooLong(t *testing.T) {
	const hold = 300 * time.Millisecond
	s := tell(t, hold, nil)
	s.gates.Set("kas", Held)
	start := time.Now()
	c := s.dial(t)
	send(t, c, "hello")
	wantReset(t, c)
	if took := time.Since(start); took < hold {
		t.Errorf("reset after %v, want %v", took, hold)
	}
	if s.metrics.of("refused_total held") != 1 || s.metrics.of("held") != 0 {
		t.Error("not counted")
	}
}

func TestForwardClosedGate(t *testing.T) {
	s := tell(t, time.Hour, nil)
	s.gates.Set("kas", Refused)
	wantRefused(t, s.addr())
	if s.metrics.of("refused_total closed") != 1 {
		t.Error("not counted")
	}
}

func TestForwardClientGoneWhileHeld(t *testing.T) {
	s := tell(t, time.Hour, nil)
	s.gates.Set("kas", Held)
	for name, leave := range map[string]func(*net.TCPConn){
		"ended without a word": func(c *net.TCPConn) { shut(c) },
		"reset":                func(c *net.TCPConn) { send(t, c, "hello"); dial.NewTCP(c).Abort(nil) },
	} {
		c := s.dial(t)
		eventually(t, "it is held", func() bool { return s.metrics.of("held") == 1 })
		leave(c)
		eventually(t, name+": noticed", func() bool { return s.metrics.of("held") == 0 })
	}
	asks := s.dial(t)
	send(t, asks, "question")
	if err := asks.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "it is held", func() bool { return s.metrics.of("held") == 1 })
	s.gates.Set("kas", Open)
	far := <-s.far
	defer shut(far)
	wantAll(t, far, "question") // it waits for an answer: it was not gone
	shut(far)
	wantAll(t, asks, "")
	if got := s.metrics.of("refused_total client_gone"); got != 2 {
		t.Errorf("%v counted as gone, want 2", got)
	}
}

// The gate learns of a lost way later than a dial does.
func TestForwardDialsAgainWhileItMayHold(t *testing.T) {
	var (
		tries atomic.Int64
		s     *story
	)
	direct := dial.Direct(&net.Dialer{})
	up, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer up.Close()
	s = tell(t, 10*time.Second, func(ctx context.Context, to dial.Target) (dial.Conn, error) {
		if tries.Add(1) < 3 {
			return nil, dial.ErrNoLink
		}
		to.Name = up.Addr().String()
		return direct(ctx, to)
	})
	c := s.dial(t)
	send(t, c, "once")
	far, err := up.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer far.Close()
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	wantAll(t, far, "once")
	if n := tries.Load(); n != 3 {
		t.Errorf("%d dials, want 3", n)
	}
}

func TestForwardStops(t *testing.T) {
	s := tell(t, time.Hour, nil)
	client, far := s.pair(t)
	s.gates.Set("kas", Held)
	held := s.dial(t)
	eventually(t, "it is held", func() bool { return s.metrics.of("held") == 1 })
	s.listeners.Close()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.server.Shutdown(ctx); !errors.Is(err, context.Canceled) {
		t.Errorf("Shutdown: %v", err)
	}
	wantReset(t, client)
	wantReset(t, far)
	wantReset(t, held)
	if s.metrics.of("refused_total stopped") != 1 {
		t.Error("the held one is not counted as stopped")
	}
}
