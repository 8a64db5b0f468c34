package stories

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/kas"
	"github.com/kasway/kasway/tests/netns/stack"
)

// upgradePlan is how much is upgraded: with FULL=1 as much as it takes to be
// sure, else as much as fits into every run of the tests.
type upgradePlan struct {
	modes         []string
	times         int
	connects      int // of clients that do not try again, in each upgrade
	watches       int // held by the agent that is superseded
	grace, spread time.Duration
}

func plannedUpgrade() upgradePlan {
	if os.Getenv("FULL") == "1" {
		return upgradePlan{[]string{"nft", "iptables", "ebpf"}, 10, 20000, 50, 30 * time.Second, 30 * time.Second}
	}
	return upgradePlan{[]string{"nft", "ebpf"}, 1, 3000, 10, 3 * time.Second, 5 * time.Second}
}

// An agent is replaced by another one, as in a DaemonSet's surge, while clients
// connect without end and others hold watches: no connect fails, every watch
// lives for the grace, and then they end evenly over the spread.
func TestUpgrade_NoConnectFails(t *testing.T) {
	t.Parallel()
	plan := plannedUpgrade()
	for _, mode := range plan.modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			stop, err := stack.Mirror(s.ControlPlane, raw4, raw6)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(stop)
			flags := diverting(mode, "--grace", plan.grace.String(), "--grace-spread", plan.spread.String())
			s.start(t, flags)
			if got := s.status(t).Mode; got != mode {
				t.Fatalf("it diverts by %s", got)
			}
			for range plan.times {
				s.upgrade(t, plan, flags)
			}
		})
	}
}

// upgrade replaces the scene's agent once.
func (s *scene) upgrade(t *testing.T, plan upgradePlan, flags []string) {
	t.Helper()
	old, first := s.agent, s.status(t)
	const taken = `kasway_agent_intercept_taken_total{target="raw"}`
	watches := s.holdWatches(t, plan.watches)
	rain := s.newRain(raw4, raw6)
	stopped := false
	defer func() {
		if !stopped {
			rain.stop()
		}
	}()
	rain.reach(t, plan.connects/5)
	if n := metric(t, old, taken); n < float64(plan.connects/5) {
		t.Errorf("the agent before has taken %v connections", n)
	}
	begun := time.Now()
	var err error
	if s.agent, err = s.AgentUnready(flags...); err != nil {
		t.Fatal(err)
	}
	if err := netns.Poll(3*patience, func() error { return s.takenOver(t, first.Generation) }); err != nil {
		t.Fatal(err)
	}
	t.Logf("taken over after %s, and %d connects", time.Since(begun).Round(time.Millisecond), rain.made.Load())
	// As the DaemonSet's controller does once the new pod is ready.
	if err := old.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	st := s.statusOf(t, first.Generation)
	if st.Phase != agent.PhaseDraining || st.Ready || st.Drain == nil {
		t.Fatalf("the agent before is %s: %+v", st.Phase, st.Drain)
	}
	if err := old.Wait(); err != nil {
		t.Errorf("the agent before ends with %v", err)
	}
	rain.reach(t, plan.connects)
	stopped = true
	for _, failed := range rain.stop() {
		t.Error(failed)
	}
	if err := netns.Poll(patience, s.operatorsReady); err != nil {
		t.Errorf("the operators' port: %v", err)
	}
	if n := metric(t, s.agent, taken); n < float64(plan.connects/5) {
		t.Errorf("the new agent has taken %v connections", n)
	}
	spreadEvenly(t, *st.Drain, watches)
}

// statusOf asks the agent of this generation, whoever is the newest.
func (s *scene) statusOf(t *testing.T, generation string) (st agent.Status) {
	t.Helper()
	return s.statusAt(t, "agent-"+generation+".sock")
}

// statusAt asks the agent behind a socket of the stack's folder.
func (s *scene) statusAt(t *testing.T, socket string) (st agent.Status) {
	t.Helper()
	out, err := s.Run("status", "-o", "json", "--admin-socket", s.Path(socket))
	if err == nil {
		err = json.Unmarshal([]byte(out), &st)
	}
	if err != nil {
		t.Fatal(err)
	}
	return st
}

// watch is a connection that is held; ended gets when and how it ends.
type watch struct{ ended chan watchEnd }

type watchEnd struct {
	at  time.Time
	err error
}

// holdWatches lets n clients watch, each over a connection of its own.
func (s *scene) holdWatches(t *testing.T, n int) (all []watch) {
	t.Helper()
	for i := range n {
		h := s.clients()[i%len(s.clients())]
		client, err := kas.NewClient("https://"+kas4.String(), s.kas.CA(), func(ctx context.Context, network, _ string) (net.Conn, error) {
			return h.Dial(ctx, network, kas4.String())
		}, false)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(client.Close)
		events, err := client.Watch(t.Context(), "interval="+[]string{"1s", "4s"}[i%2])
		if err == nil {
			_, err = events.Next()
		}
		if err != nil {
			t.Fatal(err)
		}
		w := watch{make(chan watchEnd, 1)}
		go func() {
			for err == nil {
				_, err = events.Next()
			}
			w.ended <- watchEnd{time.Now(), err}
			_ = events.Close()
		}()
		all = append(all, w)
	}
	return all
}

// spreadEvenly fails the test unless the watches were reset, from d.Resets to
// d.Ends, none within 200 ms of another.
func spreadEvenly(t *testing.T, d agent.DrainStatus, watches []watch) {
	t.Helper()
	var at []time.Time
	for _, w := range watches {
		select {
		case end := <-w.ended:
			if !errors.Is(end.err, syscall.ECONNRESET) {
				t.Errorf("a watch ends with %v, want a reset", end.err)
			}
			at = append(at, end.at)
		case <-time.After(patience):
			t.Error("a watch that has outlived its agent")
		}
	}
	slices.SortFunc(at, time.Time.Compare)
	// The agent's clock was written with the status, to the nanosecond.
	for i, when := range at {
		switch {
		case when.Before(d.Resets):
			t.Errorf("watch %d ends %s before the grace is over", i, d.Resets.Sub(when))
		case when.After(d.Ends.Add(time.Second)):
			t.Errorf("watch %d ends %s after the spread", i, when.Sub(d.Ends))
		case i > 0 && when.Sub(at[i-1]) < 200*time.Millisecond:
			t.Errorf("watch %d ends %s after another", i, when.Sub(at[i-1]))
		}
	}
}

// In mode listen the address and the ports are the first agent's while it runs:
// it hands its listeners over.
func TestUpgrade_Listen(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1})
	stop, err := stack.Mirror(s.ControlPlane, raw4)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	if s.server, err = s.Server(raw4.String()); err != nil {
		t.Fatal(err)
	}
	flags := []string{"--mode", "listen", "--bind-address", bind.String(), "--target", "7000:" + raw4.String(), "--grace", "1s", "--grace-spread", "0s"}
	s.startAgent(t, flags...)
	at := netip.AddrPortFrom(bind, rawPort)
	for range 3 {
		old, first := s.agent, s.status(t).Generation
		rain := s.newRain(at)
		rain.reach(t, 300)
		if s.agent, err = s.AgentUnready(flags...); err != nil {
			t.Fatal(err)
		}
		if err := netns.Poll(3*patience, func() error { return s.takenOver(t, first) }); err != nil {
			t.Fatal(err)
		}
		if err := old.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := old.Wait(); err != nil {
			t.Error(err)
		}
		rain.reach(t, int(rain.made.Load())+300)
		for _, failed := range rain.stop() {
			t.Error(failed)
		}
	}
}

// The agent before diverts again if the new one dies before it was told to stop.
func TestUpgrade_SuccessorDies(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			s.start(t, diverting(mode))
			old, first := s.agent, s.status(t).Generation
			var err error
			if s.agent, err = s.AgentUnready(diverting(mode)...); err != nil {
				t.Fatal(err)
			}
			if err := netns.Poll(patience, func() error { return s.takenOver(t, first) }); err != nil {
				t.Fatal(err)
			}
			if err := s.agent.Signal(syscall.SIGKILL); err != nil {
				t.Fatal(err)
			}
			_ = s.agent.Wait()
			s.agent = old
			for _, h := range s.clients() {
				s.servedAgain(t, h, svc4)
			}
			if st := s.statusOf(t, first); st.Phase != agent.PhaseDiverting || !st.Ready {
				t.Errorf("it is %s: %s", st.Phase, st.NotReady)
			}
		})
	}
}

// Two agents that start at the same moment: one of them diverts in the end, the
// other one has stood down, and everybody is served.
func TestUpgrade_TwoStartAtOnce(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables", "ebpf"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			if err := s.startServer(); err != nil {
				t.Fatal(err)
			}
			var both []*stack.Process
			for range 2 {
				p, err := s.AgentUnready(diverting(mode)...)
				if err != nil {
					t.Fatal(err)
				}
				both = append(both, p)
			}
			if err := netns.Poll(3*patience, func() error { return s.phases(agent.PhaseDiverting, agent.PhaseDrained) }); err != nil {
				t.Fatal(err)
			}
			for _, h := range s.clients() {
				s.served(t, h, svc4)
				s.served(t, h, kas6)
			}
			for _, p := range both {
				if strings.Contains(p.Log(), "mode skipped") || strings.Contains(p.Log(), `"level":"error"`) {
					t.Errorf("one has met the other:\n%s", p.Log())
				}
			}
			s.agent = both[0]
		})
	}
}

// phases is nil if those are the phases of the agents that run, in any order.
func (s *scene) phases(want ...string) error {
	entries, err := os.ReadDir(s.Dir)
	if err != nil {
		return err
	}
	var got []string
	for _, e := range entries {
		if !strings.HasPrefix(e.Name(), "agent-") || !strings.HasSuffix(e.Name(), ".sock") {
			continue
		}
		out, err := s.Run("status", "-o", "json", "--admin-socket", s.Path(e.Name()))
		if err != nil {
			return err
		}
		var st agent.Status
		if err := json.Unmarshal([]byte(out), &st); err != nil {
			return err
		}
		got = append(got, st.Phase)
	}
	slices.Sort(got)
	slices.Sort(want)
	if !slices.Equal(got, want) {
		return fmt.Errorf("agents are %q, want %q", got, want)
	}
	return nil
}
