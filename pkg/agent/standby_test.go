package agent

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// graced sets the agent's grace and spread.
func (r *rig) graced(grace, spread time.Duration) *rig {
	r.cfg.Agent.Intercept.Grace, r.cfg.Agent.Intercept.GraceSpread = grace, spread
	return r
}

// succeed asks the agent to stand down, as another one called generation that
// has begun to install itself now.
func (r *rig) succeed(generation, mode string) *intercept.Asked {
	r.t.Helper()
	stamp, err := intercept.Stamp()
	if err != nil {
		r.t.Fatal(err)
	}
	return r.say(intercept.Line{Verb: intercept.VerbStandDown, Generation: generation, Mode: mode, Stamp: stamp})
}

func (r *rig) say(l intercept.Line) *intercept.Asked {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	a, err := intercept.Ask(ctx, r.cfg.Generation, l)
	if err != nil {
		r.t.Fatal(err)
	}
	r.t.Cleanup(a.Close)
	return a
}

// answers fails the test unless that is the answer.
func (r *rig) answers(a *intercept.Asked, verb, word string) {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	l, err := a.Answer(ctx)
	if err != nil || l.Verb != verb || l.Word != word {
		r.t.Fatalf("the answer is %+v, %v; want %s %s", l, err, verb, word)
	}
}

func (r *rig) phase(want string) {
	r.t.Helper()
	eventually(r.t, want, func() bool {
		s, err := r.ask()
		return err == nil && s.Phase == want
	})
}

// host4 is the host's listener of a target.
func (r *rig) host4(target string) string {
	r.t.Helper()
	all := r.mode.Applied()
	for _, d := range all[len(all)-1].Diverts {
		if d.Name == target {
			return net.JoinHostPort("127.0.0.1", itoa(d.Ports.Host4))
		}
	}
	r.t.Fatal("no target " + target)
	return ""
}

// reset waits until c is reset and returns when.
func reset(t *testing.T, c net.Conn) time.Time {
	t.Helper()
	_ = c.SetDeadline(time.Now().Add(bound))
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes and %v, want a reset", n, err)
	}
	return time.Now()
}

// A superseded agent diverts no more, takes what was on its way, and leaves what
// it holds alone for the grace. Then it resets one after the other, those first
// that are quiet, and waits to be stopped.
func TestStandBy_GraceThenSpread(t *testing.T) {
	const grace, spread, held = 3 * time.Second, 2 * time.Second, 5
	r := newRig(t).graced(grace, spread)
	r.links.set("kas", "other")
	r.diverting()
	var conns []net.Conn
	for range held {
		conns = append(conns, r.carried(r.dial(kas)))
	}
	ends := r.carried(r.dial(kas))
	late := r.host4("kas")
	begun := time.Now()
	a := r.succeed("gen2", "fake")
	r.answers(a, intercept.VerbYes, "")
	if r.mode.Closed() != 1 {
		t.Error("it still diverts")
	}
	r.phase(PhaseDraining)
	shut(ends)
	// It was diverted before, and is only accepted now.
	c, err := net.Dial("tcp", late)
	if err == nil {
		defer shut(c)
		_ = c.SetDeadline(time.Now().Add(bound))
	}
	conns = append(conns, r.carried(c, err))
	if got := r.ready(); !strings.Contains(got, "agent gen2 has taken over: draining, ") || !strings.Contains(got, "connections left, ends by") {
		t.Errorf("readiness: %s", got)
	}
	if s := r.status(); s.Drain == nil || s.Drain.By != "gen2" || s.Drain.Connections == 0 || s.Drain.Ends.Sub(s.Drain.Since) != grace+spread {
		t.Errorf("status: %+v", s.Drain)
	}
	// The first one is never quiet for long.
	busy := make(chan struct{})
	var chat sync.WaitGroup
	chat.Go(func() {
		for {
			select {
			case <-busy:
				return
			case <-time.After(50 * time.Millisecond):
				_, _ = io.WriteString(conns[0], "x")
			}
		}
	})
	at := make([]time.Time, len(conns))
	var wg sync.WaitGroup
	for i := range conns {
		wg.Go(func() {
			if i == 0 {
				_, _ = io.Copy(io.Discard, conns[0])
				at[0] = time.Now()
				return
			}
			at[i] = reset(t, conns[i])
		})
	}
	wg.Wait()
	close(busy)
	chat.Wait()
	for _, when := range at[1:] {
		if when.After(at[0]) {
			t.Error("a busy one was reset before a quiet one")
		}
	}
	slices.SortFunc(at, time.Time.Compare)
	gap := spread / time.Duration(len(at))
	for i, when := range at {
		due := begun.Add(grace + time.Duration(i+1)*gap)
		if when.Before(due.Add(-gap/3)) || when.After(due.Add(gap)) {
			t.Errorf("connection %d is reset after %s, want %s", i, when.Sub(begun), due.Sub(begun))
		}
	}
	r.phase(PhaseDrained)
	s := r.status()
	if s.Ready || s.Drain == nil || s.Drain.Reset != len(conns) || s.Drain.Ended != 1 || s.Drain.Connections != 0 {
		t.Errorf("status at the end: %+v", s.Drain)
	}
	if n := r.metric("kasway_agent_drained_total"); n != float64(len(conns)+1) {
		t.Errorf("%v are counted", n)
	}
	stopped := time.Now()
	r.stop()
	if err := r.wait(); err != nil || time.Since(stopped) > stopGrace {
		t.Errorf("stopped after %s with %v", time.Since(stopped), err)
	}
	if r.logged(logrus.InfoLevel, "another agent diverts") != 1 || r.logged(logrus.InfoLevel, "until an agent runs again") != 0 {
		t.Error("its last words are wrong")
	}
}

// Told to stop, it ends when it has drained, and not before.
func TestStandBy_ToldToStop(t *testing.T) {
	r := newRig(t).graced(1500*time.Millisecond, 0)
	r.links.set("kas", "other")
	r.diverting()
	c := r.carried(r.dial(kas))
	begun := time.Now()
	r.answers(r.succeed("gen2", "fake"), intercept.VerbYes, "")
	r.stop()
	r.carried(c, nil)
	r.phase(PhaseDraining) // it still answers
	if at := reset(t, c); at.Sub(begun) < 1500*time.Millisecond {
		t.Errorf("reset after %s", at.Sub(begun))
	}
	if err := r.wait(); err != nil || time.Since(begun) > bound/2 {
		t.Errorf("it ends after %s with %v", time.Since(begun), err)
	}
}

// Nothing held: the grace is not waited for.
func TestStandBy_NothingHeld(t *testing.T) {
	r := newRig(t).graced(time.Hour, time.Hour)
	r.diverting()
	r.answers(r.succeed("gen2", "fake"), intercept.VerbYes, "")
	r.phase(PhaseDrained)
}

// The operators' port is the successor's.
func TestStandBy_OperatorsPort(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	r.diverting()
	a := r.succeed("gen2", "fake")
	r.answers(a, intercept.VerbYes, "")
	var l net.Listener
	eventually(t, "the operators' port is free", func() (ok bool) {
		var err error
		l, err = net.Listen("tcp", "127.0.0.1:8094")
		return err == nil
	})
	shut(l)
	a.Close()
	eventually(t, "the operators' port is back", func() bool {
		resp, err := (&http.Client{Transport: &http.Transport{DisableKeepAlives: true}}).Get("http://127.0.0.1:8094/readyz")
		if err != nil {
			return false
		}
		defer shut(resp.Body)
		return resp.StatusCode == http.StatusOK
	})
}

// When the last of those that have taken over is gone, it diverts again, to the
// state of that moment.
func TestStandBy_DivertsAgain(t *testing.T) {
	r := newRig(t).graced(time.Hour, 0)
	r.links.set("kas", "other")
	r.diverting()
	c := r.carried(r.dial(kas))
	second := r.succeed("gen2", "fake")
	r.answers(second, intercept.VerbYes, "")
	third := r.succeed("gen3", "fake")
	r.answers(third, intercept.VerbYes, "")
	applied := len(r.mode.Applied())
	second.Close()
	r.phase(PhaseDraining)
	if len(r.mode.Applied()) != applied || r.mode.Closed() != 1 {
		t.Error("it diverts beside one that has taken over")
	}
	third.Close()
	r.phase(PhaseDiverting)
	r.mode.newest(t, "diverting again", func(rules.State) bool { return true })
	r.carried(c, nil)
	r.carried(r.dial(other))
	if got := r.ready(); got != "ok" {
		t.Errorf("readiness: %s", got)
	}
	if s := r.status(); s.Drain != nil {
		t.Errorf("it shows %+v", s.Drain)
	}
	// And stops as ever.
	r.stop()
	if err := r.wait(); err != nil || r.mode.Closed() != 2 {
		t.Errorf("%v, closed %d times", err, r.mode.Closed())
	}
	if r.logged(logrus.InfoLevel, "until an agent runs again") != 1 {
		t.Error("its last words are wrong")
	}
}

// Only the newer agent is obeyed, and nobody by one that has yet to begin.
func TestStandBy_OlderIsRefused(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	starting := make(chan struct{})
	goOn := make(chan struct{})
	r.mode.onApply = func(context.Context, rules.State) error {
		r.mode.onApply = func(context.Context, rules.State) error { return nil }
		close(starting)
		<-goOn
		return nil
	}
	r.start()
	<-starting
	early := r.say(intercept.Line{Verb: intercept.VerbStandDown, Generation: "gen0", Mode: "fake", Stamp: 1})
	close(goOn)
	r.answers(early, intercept.VerbNo, noNewer)
	r.phase(PhaseDiverting)
	r.carried(r.dial(kas))
	if r.mode.Closed() != 0 {
		t.Error("it has stood down")
	}
}

// For another mode the guard is lifted while that diverts already: nobody would
// keep it, and it would refuse what the other one diverts.
func TestStandBy_AnotherMode(t *testing.T) {
	for mode, want := range map[string]rules.WhenDown{"fake": rules.Refuse, "other": rules.Direct} {
		r := newRig(t)
		r.diverting()
		a := r.succeed("gen2", mode)
		r.answers(a, intercept.VerbYes, "")
		all := r.mode.Applied()
		if got := all[len(all)-1].WhenDown; got != want {
			t.Errorf("for mode %s it leaves whenDown %s", mode, got)
		}
		a.Close()
		r.mode.newest(t, "diverting again", func(s rules.State) bool { return s.WhenDown == rules.Refuse })
		r.stop()
		if err := r.wait(); err != nil {
			t.Error(err)
		}
	}
}

// In mode listen the successor has the very listeners, and the one before takes
// nothing from them any more.
func TestStandBy_ListenersAreHandedOver(t *testing.T) {
	r := newRig(t).listening()
	r.links.set("kas")
	r.diverting()
	at := "169.254.77.2:6443"
	a := r.say(intercept.Line{Verb: intercept.VerbListeners, Generation: "gen2"})
	r.answers(a, intercept.VerbYes, "")
	l := a.Take(netip.MustParseAddrPort(at))
	if l == nil {
		t.Fatal("no listener")
	}
	defer shut(l)
	s := r.succeed("gen2", "fake")
	r.answers(s, intercept.VerbYes, "")
	for range 20 {
		c, err := net.Dial("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		_ = l.SetDeadline(time.Now().Add(bound))
		taken, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		shut(taken)
		shut(c)
	}
	shut(l)
	s.Close()
	r.phase(PhaseDiverting)
	eventually(t, "its own listener again", func() bool {
		c, err := net.Dial("tcp", at)
		if err == nil {
			shut(c)
		}
		return err == nil
	})
}

// told collects what the service manager hears.
type told struct {
	mu  sync.Mutex
	all []string
}

func (m *told) tell(states ...string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.all = append(m.all, strings.Join(states, " "))
}

func (m *told) heard(text string) bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	return slices.ContainsFunc(m.all, func(s string) bool { return strings.Contains(s, text) })
}

// reloading makes an agent whose successor is this very process.
func reloading(t *testing.T) (r *rig, m *told, signals chan os.Signal, ended chan error) {
	t.Helper()
	r = newRig(t).graced(300*time.Millisecond, 0)
	m, signals, ended = &told{}, make(chan os.Signal), make(chan error, 1)
	r.cfg.Manager, r.cfg.Reload = m.tell, signals
	r.cfg.Spawn = func() (Child, error) {
		return Child{PID: os.Getpid(), Ended: ended, Stop: func() { ended <- nil }}, nil
	}
	r.links.set("kas", "other")
	return r.diverting(), m, signals, ended
}

// A reload hands the service over, and the agent ends when it has drained.
func TestReload_HandsOver(t *testing.T) {
	r, m, signals, _ := reloading(t)
	if !m.heard("READY=1") {
		t.Error("the manager does not know that it is ready")
	}
	signals <- syscall.SIGHUP
	eventually(t, "RELOADING", func() bool { return m.heard("RELOADING=1") })
	if m.heard("MAINPID") {
		t.Error("handed over before there is a successor")
	}
	c := r.carried(r.dial(kas))
	r.answers(r.succeed("gen2", "fake"), intercept.VerbYes, "")
	reset(t, c)
	if err := r.wait(); err != nil {
		t.Error(err)
	}
	if !m.heard("MAINPID=" + pid() + " READY=1") {
		t.Errorf("the manager heard %q", m.all)
	}
	if m.heard("STOPPING") {
		t.Error("the manager takes the service for ending")
	}
}

// A successor that fails changes nothing.
func TestReload_Fails(t *testing.T) {
	r, m, signals, ended := reloading(t)
	signals <- syscall.SIGHUP
	eventually(t, "RELOADING", func() bool { return m.heard("RELOADING=1") })
	ended <- errors.New("exit status 2")
	eventually(t, "told", func() bool { return m.heard("STATUS=the last reload failed: it has ended (exit status 2)") })
	if r.logged(logrus.ErrorLevel, "the new agent does not take over, this one goes on") != 1 || m.heard("MAINPID") {
		t.Errorf("the manager heard %q", m.all)
	}
	r.carried(r.dial(kas))
	// The next one may do better.
	signals <- syscall.SIGHUP
	a := r.succeed("gen2", "fake")
	r.answers(a, intercept.VerbYes, "")
	eventually(t, "handed over", func() bool { return m.heard("MAINPID=" + pid()) })
	// It takes the service back if that one dies.
	m.mu.Lock()
	m.all = nil
	m.mu.Unlock()
	a.Close()
	eventually(t, "taken back", func() bool { return m.heard("MAINPID="+pid()+" READY=1") && m.heard("diverting again") })
	r.carried(r.dial(kas))
}

// A stranger to the reload takes over as it may, but is not the service.
func TestReload_OtherSuccessor(t *testing.T) {
	r, m, _, _ := reloading(t)
	r.answers(r.succeed("gen2", "fake"), intercept.VerbYes, "")
	r.phase(PhaseDrained)
	if m.heard("MAINPID") {
		t.Errorf("the manager heard %q", m.all)
	}
}

func pid() string { return strconv.Itoa(os.Getpid()) }

func itoa(port uint16) string { return strconv.Itoa(int(port)) }
