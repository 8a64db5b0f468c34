package agent

import (
	"context"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// Why another agent is told no.
const (
	noStarting = "starting" // we have not begun to install ourselves
	noNewer    = "newer"    // we are the newer one
)

// hear looks at what another agent asks. It reports whether this one is to
// stand down; all else is answered here.
func (a *Agent) hear(r *intercept.Request) (standDown bool) {
	select {
	case <-r.Gone():
		return false // nobody waits for it any longer
	default:
	}
	var err error
	switch {
	case r.Verb == intercept.VerbListeners:
		err = r.Give(a.listeners.Fixed())
	case !r.Newer(a.cfg.Generation, a.stamp):
		err = r.No(noNewer)
	default:
		return true
	}
	if err != nil {
		a.log.WithError(err).Warn("another agent could not be answered")
	}
	return false
}

// standBy is the life of an agent after another one has taken over: it stops
// diverting, serves what it holds to the end of grace and spread, and then
// waits to be stopped, as a container that ended would be started again. It
// reports whether this agent is to divert again, because those that have taken
// over are gone.
//
// To be told to stop does not cut what is held short, but it rules out that
// this agent diverts again. life ends only if the agent cannot go on.
func (a *Agent) standBy(ctx, life context.Context, first *intercept.Request) (again bool) {
	s := &succession{agent: a, gone: make(chan string), left: make(chan struct{}), living: map[string]bool{}}
	defer s.end()
	a.standDown(ctx, first)
	s.add(first)
	drained := a.beginDrain(life, first.Generation)
	defer drained.stop()
	done, told, changed := drained.done, ctx.Done(), a.cfg.Links.Changed()
	for {
		select {
		case <-life.Done():
			return false
		case <-told:
			told = nil
			if len(s.living) == 0 || done == nil {
				return false
			}
			a.log.Info("told to stop: ends when what it holds has ended")
		case r := <-a.presence.Requests():
			if a.hear(r) {
				a.answer(r)
				s.add(r)
			}
		case g := <-s.gone:
			if delete(s.living, g); len(s.living) > 0 {
				continue
			}
			a.log.WithField("successor", g).Warn("the agent that had taken over is gone")
			return told != nil
		case <-done:
			if done = nil; told == nil || a.handedOver {
				return false
			}
			a.role.enter(PhaseDrained)
		case <-changed:
			changed = a.cfg.Links.Changed()
			a.open(a.state())
		case <-a.cfg.Reload:
			a.log.Warn("reload: another agent has taken over already; ask that one")
		case err := <-a.childEnded():
			a.child = nil
			a.log.WithError(err).Warn("the process that a reload has started has ended")
		}
	}
}

// standDown stops diverting and lets the successor know. Whatever fails, the
// other one diverts already, and what is left here lapses with the heartbeat.
func (a *Agent) standDown(ctx context.Context, r *intercept.Request) {
	log := a.log.WithFields(logrus.Fields{"successor": r.Generation, observe.FieldMode: r.Mode})
	ctx = context.WithoutCancel(ctx)
	if r.Mode != a.choice.Name && !a.placed.fixed {
		// Nobody else keeps what this mode leaves for a dead agent, and it would
		// refuse what the other mode diverts.
		s := a.state()
		s.WhenDown = rules.Direct
		if err := a.choice.Mode.Apply(ctx, s); err != nil {
			log.WithError(err).Warn("the guard of a dead agent could not be lifted before another mode takes over")
		}
	}
	if err := a.choice.Mode.Close(); err != nil {
		log.WithError(err).Warn("what is installed could not be removed: it lapses by itself")
	}
	if a.placed.fixed {
		// The other one has these listeners too, and takes what waits there.
		var names []string
		for _, t := range a.cfg.Agent.Targets {
			names = append(names, t.Name)
		}
		if err := a.listeners.Refuse(ctx, names); err != nil {
			log.WithError(err).Warn("the listeners could not be closed")
		}
	}
	a.answer(r)
	log.WithFields(logrus.Fields{
		"connections": a.conns.Len(), "grace": a.cfg.Agent.Intercept.Grace, "spread": a.cfg.Agent.Intercept.GraceSpread,
	}).Info("another agent has taken over: no longer diverting, draining")
	a.handOver(r)
}

func (a *Agent) answer(r *intercept.Request) {
	if err := r.Yes(); err != nil {
		a.log.WithError(err).Debug("the agent that has taken over was not told that this one has stood down")
	}
}

// draining is a drain under way.
type draining struct {
	done <-chan struct{}
	stop func()
}

func (a *Agent) beginDrain(life context.Context, by string) draining {
	c := a.cfg.Agent.Intercept
	d := newDrain(by, c.Grace, c.GraceSpread, a.conns.Snapshot)
	d.count = func(reason string) { a.metrics.drained.WithLabelValues(reason).Inc() }
	d.report = a.role.draining
	d.report(d.status)
	a.role.enter(PhaseDraining)
	ctx, cancel := context.WithCancel(life)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if d.run(ctx); ctx.Err() != nil {
			return
		}
		a.log.WithFields(logrus.Fields{
			"ended": d.status.Ended, "reset": d.status.Reset, "after": time.Since(d.status.Since).Round(time.Millisecond),
		}).Info("drained: nothing is left of what this agent held when the other one took over")
	}()
	return draining{done: done, stop: func() { cancel(); <-done }}
}

// succession knows which of the agents that have taken over live.
type succession struct {
	agent  *Agent
	gone   chan string
	left   chan struct{}
	living map[string]bool
	watch  []chan struct{}
}

// add watches over one more.
func (s *succession) add(r *intercept.Request) {
	s.living[r.Generation] = true
	done := make(chan struct{})
	s.watch = append(s.watch, done)
	go func() {
		defer close(done)
		select {
		case <-r.Gone():
		case <-s.left:
			return
		}
		select {
		case s.gone <- r.Generation:
		case <-s.left:
		}
	}()
}

func (s *succession) end() {
	close(s.left)
	for _, done := range s.watch {
		<-done
	}
}
