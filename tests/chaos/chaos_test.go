//go:build chaos

package chaos

import (
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// modes are all of them.
var modes = []string{"ebpf", "nft", "iptables", "tproxy", "listen"}

// whenDowns are the settings that the mode has: the address of mode listen is
// the agent's own, so that nobody else answers there.
func whenDowns(mode string) []string {
	if mode == "listen" {
		return []string{"refuse"}
	}
	return []string{"refuse", "direct"}
}

// A blow stops or ends an agent. It returns what revives it; nil: another agent
// must take its place.
type blow struct {
	name   string
	strike func(*stack.Process) (revive func() error, err error)
}

// starved is the blow after which an agent lives a little now and then.
const starved = "starved"

// starvation is how long it lasts.
const starvation = 5 * time.Second

// blows are in the order in which a run has them. The last one is where clients
// that hurry make the most of their connects: nobody is there to carry them.
var blows = []blow{
	{"SIGSTOP", func(p *stack.Process) (func() error, error) {
		return func() error { return p.Signal(syscall.SIGCONT) }, p.Signal(syscall.SIGSTOP)
	}},
	// Asked for by STARVE=1 alone: a starved agent still beats now and then, and
	// so keeps clients waiting for longer than it may. No mode passes yet.
	{starved, func(p *stack.Process) (func() error, error) { return p.Starve() }},
	{"SIGKILL", func(p *stack.Process) (func() error, error) { return nil, p.Signal(syscall.SIGKILL) }},
}

// struck are the blows of this run.
func struck() (all []blow) {
	for _, b := range blows {
		if b.name != starved || os.Getenv("STARVE") == "1" {
			all = append(all, b)
		}
	}
	return all
}

// TestChaos strikes the agent under a storm of connects by one blow after the
// other. A run is one mode under one whenDown, of at least enough connects.
func TestChaos(t *testing.T) {
	for _, mode := range modes {
		for _, whenDown := range whenDowns(mode) {
			t.Run(mode+"/"+whenDown, func(t *testing.T) {
				t.Parallel()
				s := setUp(t, mode, whenDown, netns.AgentUnit)
				agent := s.start(t)
				storm := newStorm(s.clients, s.to)
				err := storm.proceed(time.Time{}, 50)
				var strokes []stroke
				blows := struck()
				for i := 0; err == nil && i < len(blows); i++ {
					var one stroke
					one, err = s.strike(storm, agent, blows[i], i == len(blows)-1)
					strokes, agent = append(strokes, one), one.agent
				}
				all := storm.end()
				t.Logf("%s", summary(all))
				if err != nil {
					t.Fatalf("%v\nthe agent wrote:\n%s", err, agent.Log())
				}
				for _, o := range strokes {
					t.Logf("begun and ended from 3 s after %s on: %s", o.blow, summary(during(all, o.struck.Add(within), o.revived)))
				}
				judge(t, all, strokes, storm.workers, s.whenDown)
				s.attached(t)
				s.tidy(t, agent)
			})
		}
	}
}

// stroke is when what happened because of one blow.
type stroke struct {
	blow                      string
	agent                     *stack.Process // the one that lives in the end
	struck, revived, restored time.Time
}

// strike strikes, waits until every client has met what is left, and revives.
// After the last blow of a run that is once there are enough connects.
func (s *scene) strike(old *storm, agent *stack.Process, b blow, last bool) (o stroke, err error) {
	o = stroke{blow: b.name, agent: agent, struck: time.Now()}
	revive, err := b.strike(agent)
	if err != nil {
		return o, err
	}
	var fresh *storm
	if b.name == starved {
		// The old clients may all wait for what the agent took just before.
		<-time.After(time.Until(o.struck.Add(within)))
		fresh = newStorm(s.clients, s.to)
		<-time.After(time.Until(o.struck.Add(starvation)))
	} else if err := old.proceed(o.struck.Add(within), 50); err != nil {
		return o, fmt.Errorf("after %s: %w", b.name, err)
	}
	if last {
		if err := old.amounts(enough); err != nil {
			return o, err
		}
	}
	o.revived = time.Now()
	if revive != nil {
		if err := revive(); err != nil {
			return o, err
		}
		o.restored = o.revived.Add(within)
		if fresh != nil {
			old.add(fresh.end())
		}
	} else {
		_ = agent.Wait() // reports the signal
		if o.agent, err = s.Agent(s.flags...); err != nil {
			return o, err
		}
		o.restored = time.Now()
	}
	if err := old.proceed(o.restored, 50); err != nil {
		return o, fmt.Errorf("after the recovery from %s: %w", b.name, err)
	}
	return o, nil
}

// judge holds every connect against what was going on.
func judge(t *testing.T, all []connect, strokes []stroke, workers int, whenDown string) {
	t.Helper()
	show := show{t: t}
	for _, c := range all {
		show.always(c, whenDown)
	}
	calm := time.Time{} // since when the agent is well
	for _, o := range strokes {
		var cut []connect
		waited := 0
		for _, c := range all {
			switch {
			case c.begun.Before(calm) || !c.begun.Before(o.restored):
				continue // another stroke's
			case c.ended.Before(o.struck) && c.what != carried:
				show.fail("before "+o.blow, c)
			case c.begun.After(o.struck.Add(within)) && c.ended.Before(o.revived) && !o.permits(c.what, whenDown):
				show.fail("3 s after "+o.blow, c)
			case o.waited(c):
				waited++
			}
			if c.what == broken {
				cut = append(cut, c)
			}
		}
		if waited > 0 {
			t.Errorf("%s: %d clients that came more than 3 s later were neither carried nor %s, but taken and kept waiting until the agent was revived",
				o.blow, waited, down(whenDown))
		}
		if len(cut) > workers {
			t.Errorf("%s: %d connections were cut, more than the %d workers have in flight", o.blow, len(cut), workers)
			for _, c := range cut {
				t.Logf("begun %s after the blow, %s after the revival: %s", c.begun.Sub(o.struck).Round(time.Millisecond),
					c.begun.Sub(o.revived).Round(time.Millisecond), c)
			}
		}
		calm = o.restored
	}
	for _, c := range all {
		if c.begun.After(calm) && c.what != carried {
			show.fail("after the last recovery", c)
		}
	}
}

// during are the connects that began and ended between the times.
func during(all []connect, from, to time.Time) (some []connect) {
	for _, c := range all {
		if c.begun.After(from) && c.ended.Before(to) {
			some = append(some, c)
		}
	}
	return some
}

// tooSoon is how long before the revival a client must have come to have had the
// time to be carried.
const tooSoon = time.Second

// waited: the client came when the guard had to be in force already, was taken
// all the same, and heard nothing until the agent was revived.
func (o stroke) waited(c connect) bool {
	return c.begun.After(o.struck.Add(within)) && c.begun.Before(o.revived.Add(-tooSoon)) && c.ended.After(o.revived)
}

// permits says whether a connect may meet what, more than 3 s after the blow.
// An agent that gets a little time now and then carries some in between.
func (o stroke) permits(what, whenDown string) bool {
	return what == down(whenDown) || o.blow == starved && what == carried
}
