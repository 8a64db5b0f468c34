package intercept

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// presenceBound is what nothing here takes unless it never happens.
const presenceBound = 20 * time.Second

func announce(t *testing.T, generation string) *Presence {
	t.Helper()
	p, err := Announce(generation)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func askFor(t *testing.T, generation string, l Line) *Asked {
	t.Helper()
	a, err := Ask(t.Context(), generation, l)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(a.Close)
	return a
}

func requested(t *testing.T, p *Presence) *Request {
	t.Helper()
	select {
	case r := <-p.Requests():
		return r
	case <-time.After(presenceBound):
		t.Fatal("nobody asks")
		return nil
	}
}

func answered(t *testing.T, a *Asked) (Line, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), presenceBound)
	defer cancel()
	return a.Answer(ctx)
}

func over(t *testing.T, what string, gone <-chan struct{}) {
	t.Helper()
	select {
	case <-gone:
	case <-time.After(presenceBound):
		t.Errorf("%s is never over", what)
	}
}

// otherUser runs f on a thread of another user's, which ends with f.
func otherUser(t *testing.T, f func() error) error {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("only root can be another user")
	}
	done := make(chan error)
	go func() {
		runtime.LockOSThread() // never unlocked
		const uid = 12345
		if _, _, errno := unix.RawSyscall(unix.SYS_SETRESUID, uid, uid, uid); errno != 0 {
			done <- errno
			return
		}
		done <- f()
	}()
	return <-done
}

var standDown = Line{Verb: VerbStandDown, Generation: "young", Mode: "nft", Stamp: 7}

func TestPresence(t *testing.T) {
	a, b := announce(t, "gen1"), announce(t, "gen2")
	present := func() []string {
		t.Helper()
		all, err := Present()
		if err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(slices.Values(slices.DeleteFunc(all, func(g string) bool { return g != "gen1" && g != "gen2" })))
	}
	// What a visitor's connection is called is the same, and is no agent.
	asked := askFor(t, "gen1", standDown)
	requested(t, a)
	if got := present(); !slices.Equal(got, []string{"gen1", "gen2"}) {
		t.Errorf("present are %v", got)
	}
	if others, err := Others("gen1"); err != nil || !slices.Contains(others, "gen2") || slices.Contains(others, "gen1") {
		t.Errorf("besides gen1 there are %v, %v", others, err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	over(t, "the request", asked.Gone())
	if got := present(); !slices.Equal(got, []string{"gen2"}) {
		t.Errorf("after the end of one, present are %v", got)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if got := present(); len(got) > 0 {
		t.Errorf("after the end of both, present are %v", got)
	}
	for _, name := range []string{"", "../x", "a b", strings.Repeat("a", 33)} {
		if p, err := Announce(name); err == nil {
			_ = p.Close()
			t.Errorf("an agent can be called %q", name)
		}
	}
}

// A line each way, and then the connection says who lives.
func TestPresence_AskAndAnswer(t *testing.T) {
	p := announce(t, "old")
	for _, yes := range []bool{true, false} {
		a := askFor(t, "old", standDown)
		r := requested(t, p)
		if r.Line != standDown || r.PID != os.Getpid() {
			t.Errorf("asked for %+v by pid %d", r.Line, r.PID)
		}
		want := Line{Verb: VerbYes, Generation: "old"}
		err := error(nil)
		if yes {
			err = r.Yes()
		} else {
			want = Line{Verb: VerbNo, Generation: "old", Word: "newer"}
			err = r.No("newer")
		}
		if got, aerr := answered(t, a); err != nil || aerr != nil || got != want {
			t.Errorf("answer %+v, %v, %v; want %+v", got, err, aerr, want)
		}
		select {
		case <-r.Gone():
			t.Error("the asker is gone before it is")
		case <-a.Gone():
			t.Error("the one that was asked is gone before it is")
		case <-time.After(20 * time.Millisecond):
		}
		a.Close()
		over(t, "the request", r.Gone())
	}
}

// An agent of version 0.1 listens and never accepts; one that is busy has not
// received yet.
func TestPresence_NoAnswer(t *testing.T) {
	l, err := net.Listen("unix", presencePrefix+"silent")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	p := announce(t, "busy")
	for _, g := range []string{"silent", "busy"} {
		a := askFor(t, g, standDown)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		if _, err := a.Answer(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("%s: %v, want it to be a question of time", g, err)
		}
		cancel()
	}
	// It hears of it when it has the time, unless the asker has given up.
	r := requested(t, p)
	if err := r.Yes(); err != nil {
		t.Error(err)
	}
	askFor(t, "busy", standDown).Close()
	b := askFor(t, "busy", standDown)
	for r := requested(t, p); r.Yes() != nil; r = requested(t, p) {
		over(t, "a request that nobody waits for", r.Gone())
	}
	if _, err := answered(t, b); err != nil {
		t.Error(err)
	}
}

// Another user's processes are neither agents nor heard by them.
func TestPresence_Strangers(t *testing.T) {
	p := announce(t, "old")
	err := otherUser(t, func() error {
		c, err := net.Dial("unix", presencePrefix+"old")
		if err != nil {
			return err
		}
		defer c.Close()
		_, _ = io.WriteString(c, standDown.String()) // it may have hung up already
		_ = c.SetDeadline(time.Now().Add(presenceBound))
		if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			return errors.New("it is not hung up on")
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
	select {
	case r := <-p.Requests():
		t.Errorf("a stranger is heard: %+v", r.Line)
	case <-time.After(20 * time.Millisecond):
	}

	var fake net.Listener
	if err := otherUser(t, func() (err error) {
		fake, err = net.Listen("unix", presencePrefix+"fake")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	defer fake.Close()
	if others, err := Others("x"); err != nil || slices.Contains(others, "fake") || !slices.Contains(others, "old") {
		t.Errorf("agents are %v, %v", others, err)
	}
	if a, err := Ask(t.Context(), "fake", standDown); !errors.Is(err, errNotAnAgent) {
		if err == nil {
			a.Close()
		}
		t.Errorf("asking a stranger: %v", err)
	}
}

func TestTrustedUID(t *testing.T) {
	for _, c := range []struct {
		peer    uint32
		own     int
		trusted bool
	}{{0, 0, true}, {0, 1000, true}, {1000, 1000, true}, {1000, 0, false}, {1001, 1000, false}, {65534, 0, false}, {1<<32 - 1, -1, false}} {
		if got := trustedUID(c.peer, c.own) == nil; got != c.trusted {
			t.Errorf("uid %d for uid %d: trusted %v", c.peer, c.own, got)
		}
	}
}

// Whatever is said besides a request, the connection ends and nothing happens;
// and however many come, an agent is heard.
func TestPresence_GarbageAndFlood(t *testing.T) {
	p := announce(t, "old")
	for _, text := range []string{
		"\n", "stand down\n", "kasway/2 stand-down young nft 7\n", "kasway/1 yes old\n", strings.Repeat("a", 1<<16),
		"\x00\xff\n", standDown.String() + standDown.String(),
	} {
		c, err := net.Dial("unix", presencePrefix+"old")
		if err != nil {
			t.Fatal(err)
		}
		_, _ = io.WriteString(c, text) // it may hang up amid that
		_ = c.SetDeadline(time.Now().Add(presenceBound))
		if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%.40q is answered", text)
		}
		_ = c.Close()
	}
	// More than are heard at a time, that say nothing.
	var silent []net.Conn
	for range 3 * maxVisitors {
		c, err := net.Dial("unix", presencePrefix+"old")
		if err != nil {
			t.Fatal(err)
		}
		silent = append(silent, c)
	}
	defer func() {
		for _, c := range silent {
			_ = c.Close()
		}
	}()
	for _, c := range silent {
		_ = c.SetDeadline(time.Now().Add(presenceBound))
		if n, err := c.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error("one that says nothing is not hung up on")
		}
	}
	stop := make(chan struct{})
	flooded := make(chan error, 1)
	go func() {
		flooded <- otherUser(t, func() error {
			for {
				select {
				case <-stop:
					return nil
				default:
				}
				if c, err := net.Dial("unix", presencePrefix+"old"); err == nil {
					_ = c.Close()
				}
			}
		})
	}()
	for range 20 {
		a := askFor(t, "old", standDown)
		if err := requested(t, p).Yes(); err != nil {
			t.Error(err)
		}
		if _, err := answered(t, a); err != nil {
			t.Errorf("amid a flood: %v", err)
		}
		a.Close()
	}
	close(stop)
	if err := <-flooded; err != nil {
		t.Error(err)
	}
}

// A listener that is given away goes on to take connections, those that waited
// in its queue among them.
func TestPresence_Listeners(t *testing.T) {
	p := announce(t, "old")
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	at := l.Addr().(*net.TCPAddr).AddrPort()
	waiting, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	defer waiting.Close()
	a := askFor(t, "old", Line{Verb: VerbListeners, Generation: "young"})
	if err := requested(t, p).Give([]*net.TCPListener{l.(*net.TCPListener)}); err != nil {
		t.Fatal(err)
	}
	if _, err := answered(t, a); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if a.Take(netip.MustParseAddrPort("127.0.0.1:1")) != nil {
		t.Error("a listener at another address")
	}
	got := a.Take(at)
	if got == nil {
		t.Fatal("no listener")
	}
	defer func() { _ = got.Close() }()
	if a.Take(at) != nil {
		t.Error("the listener twice")
	}
	_ = got.SetDeadline(time.Now().Add(presenceBound))
	for _, dial := range []bool{false, true} {
		if dial {
			c, err := net.Dial("tcp", at.String())
			if err != nil {
				t.Fatal(err)
			}
			defer c.Close()
		}
		c, err := got.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_ = c.Close()
	}
}
