package agent

import (
	"context"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// before is an agent that was there before.
type before struct {
	*intercept.Presence
	t *testing.T
}

func newBefore(t *testing.T, generation string) before {
	t.Helper()
	p, err := intercept.Announce(generation)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return before{p, t}
}

// asked is the next request.
func (b before) asked() *intercept.Request {
	b.t.Helper()
	select {
	case r := <-b.Requests():
		return r
	case <-time.After(bound):
		b.t.Fatal("it is not asked")
		return nil
	}
}

func (b before) notAsked() {
	b.t.Helper()
	select {
	case r := <-b.Requests():
		b.t.Fatalf("it is asked: %+v", r.Line)
	case <-time.After(50 * time.Millisecond):
	}
}

var up = LinkStatus{Server: "s", State: LinkUp}

// It takes over once it has a link, has installed itself and is proven; it is
// ready when the one before has stood down, and makes sure of what it has
// installed then.
func TestTakeover_Order(t *testing.T) {
	r := newRig(t)
	old := newBefore(t, "old")
	r.links.set("kas", "other")
	r.start()
	eventually(t, "waiting", func() bool {
		s, err := r.ask()
		return err == nil && s.NotReady == "waiting for a link before it takes over from agent old"
	})
	old.notAsked()
	if len(r.mode.Applied()) > 0 {
		t.Error("diverted without a link")
	}
	// Whoever asks it meanwhile is to begin before it.
	r.answers(r.succeed("gen2", "fake"), intercept.VerbNo, noStarting)

	r.links.show(up)
	req := old.asked()
	stamp, err := intercept.Stamp()
	if req.Verb != intercept.VerbStandDown || req.Generation != "gen1" || req.Mode != "fake" || err != nil || req.Stamp <= 0 || req.Stamp > stamp {
		t.Errorf("asked for %+v", req.Line)
	}
	if len(r.mode.Applied()) != 1 {
		t.Error("it asks before it diverts")
	}
	if got := r.ready(); got != "not ready: taking over from agent old" {
		t.Errorf("readiness: %s", got)
	}
	if err := req.Yes(); err != nil {
		t.Error(err)
	}
	eventually(t, "ready", func() bool { return r.ready() == "ok" })
	eventually(t, "applied anew", func() bool { return len(r.mode.Applied()) == 2 })
	select {
	case <-req.Gone():
		t.Error("it does not want it any longer")
	default:
	}
	r.stop()
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	select {
	case <-req.Gone():
	case <-time.After(bound):
		t.Error("the one before is not told of its end")
	}
}

// Without a link it goes on as soon as nobody else is there to carry.
func TestTakeover_TheOneBeforeDies(t *testing.T) {
	r := newRig(t)
	old := newBefore(t, "old")
	r.start()
	eventually(t, "waiting", func() bool { return r.logged(logrus.InfoLevel, "taking over from it once a link is up") == 1 })
	if err := old.Close(); err != nil {
		t.Error(err)
	}
	r.phase(PhaseDiverting)
}

// One that never answers, as in version 0.1, is not waited for, and nothing of
// what it may have installed is removed before it ends.
func TestTakeover_NoAnswer(t *testing.T) {
	r := newRig(t)
	l, err := net.Listen("unix", "@kasway-agent-old")
	if err != nil {
		t.Fatal(err)
	}
	defer shut(l)
	swept := make(chan struct{}, 1)
	r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
		return []intercept.Candidate{r.candidate("fake")}, []intercept.Candidate{{Name: "unused", Cleanup: func(context.Context) error {
			swept <- struct{}{}
			return nil
		}}}
	}
	r.links.set("kas", "other")
	r.links.show(up)
	r.start()
	begun := time.Now()
	eventually(t, "ready", func() bool { _, err := r.ask(); return err == nil && r.ready() == "ok" })
	if took := time.Since(begun); took < answerWithin || took > answerWithin+bound/4 {
		t.Errorf("ready after %s", took)
	}
	if r.logged(logrus.WarnLevel, "does not answer") != 1 {
		t.Error("that is not in the log")
	}
	select {
	case <-swept:
		t.Error("swept while the one before lives")
	default:
	}
	shut(l)
	select {
	case <-swept:
	case <-time.After(bound):
		t.Error("never swept")
	}
}

// thief takes the self-test's connections, as an agent does that diverts first,
// until it has stood down.
func (r *rig) thief() (standDown func()) {
	r.t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		r.t.Fatal(err)
	}
	var stood atomic.Bool
	to := make(chan string, 1)
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if stood.Load() {
				at := <-to
				to <- at
				if far, err := net.Dial("tcp", at); err == nil {
					n := make([]byte, 16)
					_, _ = io.ReadFull(c, n)
					_, _ = far.Write(n)
					_, _ = io.ReadFull(far, n)
					_, _ = c.Write(n)
					shut(far)
				}
			}
			shut(c)
		}
	})
	r.t.Cleanup(func() { shut(l); wg.Wait() })
	r.mode.onApply = func(_ context.Context, s rules.State) error {
		if r.mode.open != nil {
			return nil
		}
		for _, d := range s.Diverts {
			for _, e := range d.Entries {
				if d.Name != intercept.SelfTestName {
					continue
				}
				if len(to) == 0 {
					to <- net.JoinHostPort("127.0.0.1", itoa(d.Ports.Host4))
				}
				if err := r.mode.forward(netip.AddrPortFrom(e.Prefix.Addr(), e.Port), l.Addr().(*net.TCPAddr).AddrPort()); err != nil {
					return err
				}
			}
		}
		return nil
	}
	return func() { stood.Store(true) }
}

// Where the one before diverts first, by another mode, it stands down for the
// proof.
func TestTakeover_ProofNeedsIt(t *testing.T) {
	r := newRig(t)
	old := newBefore(t, "old")
	r.links.set("kas", "other")
	r.links.show(up)
	standDown := r.thief()
	r.start()
	req := old.asked()
	standDown()
	if err := req.Yes(); err != nil {
		t.Error(err)
	}
	eventually(t, "ready", func() bool { _, err := r.ask(); return err == nil && r.ready() == "ok" })
	select {
	case <-req.Gone():
		t.Error("it does not want it any longer")
	default:
	}
	old.notAsked()
}

// If it does not work even so, the one before is let go on.
func TestTakeover_LetsGoOn(t *testing.T) {
	r := newRig(t)
	old := newBefore(t, "old")
	r.links.set("kas", "other")
	r.links.show(up)
	r.thief()
	failed := make(chan error, 1)
	go func() { failed <- r.fails() }()
	req := old.asked()
	if err := req.Yes(); err != nil {
		t.Error(err)
	}
	select {
	case <-req.Gone():
	case <-time.After(bound):
		t.Error("the one before is not let go on")
	}
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "it does not work") {
		t.Errorf("it ends with %v", err)
	}
}
