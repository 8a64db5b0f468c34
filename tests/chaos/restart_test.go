//go:build chaos

package chaos

import (
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// restarts is how often the agent of TestCase_B53_AgentRestartLoop is restarted.
const restarts = 20

// nested is where its agent runs: a container within a container, as a node that
// is itself one has it.
const nested = "outer.slice/outer-container.scope/" + netns.AgentUnit

// An agent that is restarted again and again, from a nested cgroup, once killed
// and once told to end, under a storm of connects: connects are carried or
// refused in between, and never wait or reach the KAS by themselves. Mode ebpf
// has one program at each hook all the time, by the links of the first agent.
func TestCase_B53_AgentRestartLoop(t *testing.T) {
	for _, mode := range modes {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := setUp(t, mode, "refuse", nested)
			agent := s.start(t)
			links := s.attached(t)
			storm := newStorm(s.clients, s.to)
			err := storm.proceed(time.Time{}, 10)
			for i := 0; err == nil && i < restarts; i++ {
				sig := []syscall.Signal{syscall.SIGKILL, syscall.SIGTERM}[i%2]
				if err = agent.Signal(sig); err != nil {
					break
				}
				if werr := agent.Wait(); sig == syscall.SIGTERM && werr != nil {
					t.Errorf("restart %d: the agent ends with %v after SIGTERM", i+1, werr)
				}
				s.kept(t, links)
				if err = storm.amounts((i + 1) * enough / restarts); err != nil {
					break
				}
				if agent, err = s.Agent(s.flags...); err == nil {
					s.kept(t, links)
					err = storm.proceed(time.Now(), 10)
				}
			}
			restored := time.Now()
			if err == nil {
				err = storm.proceed(restored, 50)
			}
			all := storm.end()
			t.Logf("%d restarts: %s", restarts, summary(all))
			if err != nil {
				t.Fatal(err)
			}
			s.judgeRestarts(t, all, restored, storm.workers)
			s.tidy(t, agent)
		})
	}
}

// kept demands the same links as ever, with one program each.
func (s *scene) kept(t *testing.T, links []uint32) {
	t.Helper()
	if now := s.attached(t); !slices.Equal(now, links) {
		t.Errorf("attached by the links %v, which were %v at first", now, links)
	}
}

func (s *scene) judgeRestarts(t *testing.T, all []connect, restored time.Time, workers int) {
	t.Helper()
	show, cut := show{t: t}, 0
	for _, c := range all {
		show.always(c, s.whenDown)
		if c.begun.After(restored) && c.what != carried {
			show.fail("after the last restart", c)
		}
		if c.what == broken {
			cut++
		}
	}
	if cut > restarts*workers {
		t.Errorf("%d connections were cut by %d restarts, more than the %d workers have in flight", cut, restarts, workers)
	}
}
