package agent

import (
	"context"
	"errors"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// stopGrace is what taken connections get to end by themselves when the agent
// stops. Those of KAS clients never do, and the node's new connects are refused
// meanwhile, so it is only for requests that are under way.
const stopGrace = time.Second

// retryApply is when a change that could not be applied is tried again.
const retryApply = time.Second

// divert opens the listeners, chooses the mode, and keeps what is installed in
// step with the world until ctx ends; then it undoes all that in reverse. After
// another agent has taken over it goes on until what it holds has ended, or
// life ends.
func (a *Agent) divert(ctx, life context.Context) (err error) {
	defer func() {
		if ctx.Err() != nil {
			err = nil // what being told to stop has broken off has not failed
		}
		a.dropChild()
		a.takeover.close() // an agent that drains diverts again while we end
		err = errors.Join(err, a.shutdown(ctx))
	}()
	next, err := a.takeover.turn(ctx)
	defer func() { next() }()
	if err != nil {
		return err
	}
	if err := a.addresses.Ensure(a.placed.addresses...); err != nil {
		return err
	}
	a.takeover.inherit(ctx)
	a.ports, err = a.listeners.Set(ctx, a.targets)
	a.takeover.dropSockets()
	if err != nil {
		return err
	}
	changed := a.cfg.Links.Changed()
	state := a.state()
	a.open(state)
	choose := intercept.ChooseConfig{
		Try: a.takeover.candidates(), Others: a.view.others, State: state, Prove: a.takeover.prove,
		Beside: func() bool { return len(a.others()) > 0 }, Log: a.log, Metrics: a.view.metrics,
	}
	if a.choice, err = intercept.Choose(ctx, choose); err != nil {
		return err
	}
	next()
	next = func() {}
	before := a.takeover.relieve(life, a.choice.Name)
	if before.answered == nil {
		a.main = true // whoever has spawned it
	}
	a.view.setChoice(a.choice, state)
	a.role.enter(PhaseDiverting)
	a.log.WithFields(logrus.Fields{observe.FieldMode: a.choice.Name, "generation": a.cfg.Generation, "targets": len(a.cfg.Agent.Targets)}).
		Info("diverting")
	a.tell("READY=1", "STATUS=diverting by "+a.choice.Name)
	return a.follow(ctx, life, following{changed: changed, applied: state, before: before, choose: choose})
}

// following is what follow begins with.
type following struct {
	changed <-chan struct{} // of the links
	applied rules.State
	before  handover
	choose  intercept.ChooseConfig
}

// errAnew is why the former state is applied again: what others have installed
// or removed meanwhile may have been ours as well.
var errAnew = errors.New("not known to be installed")

// follow applies every change. After a failure nobody knows what is installed,
// so the wanted state is applied even if it is the former one again.
func (a *Agent) follow(ctx, life context.Context, f following) error {
	var failing error
	var retry <-chan time.Time // while failing
	keep := a.keep(f.applied)
	defer func() { keep.stop() }()
	for {
		if failing == nil {
			retry = nil
		} else if retry == nil {
			retry = time.After(retryApply)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.resolved:
		case <-f.changed:
		case <-retry:
			retry = nil
		case <-keep.due():
			failing = keep.look(ctx, f.applied, failing)
			continue
		case r := <-a.presence.Requests():
			if !a.hear(r) {
				continue
			}
			keep.stop()
			if !a.standBy(ctx, life, r) {
				return nil
			}
			a.resume(ctx)
			keep = a.keep(f.applied)
			failing = errAnew
		case <-f.before.answered:
			f.before.answered, failing = nil, errAnew
			a.main = true
		case <-f.before.gone:
			f.before.gone = nil
			f.choose.Sweep(ctx, a.choice.Name)
			continue
		case <-a.cfg.Reload:
			a.reload()
			continue
		case err := <-a.childEnded():
			a.childHasEnded(err)
			continue
		case <-a.childLate():
			a.childIsLate()
			continue
		}
		failing = a.apply(ctx, &f, failing)
	}
}

// apply installs what is wanted now, unless that is in force already. Its error
// is the next failing.
func (a *Agent) apply(ctx context.Context, f *following, failing error) error {
	// A new channel first, so that no change is missed.
	f.changed = a.cfg.Links.Changed()
	state := a.state()
	a.open(state)
	if failing == nil && sameState(state, f.applied) {
		return nil
	}
	err := a.choice.Mode.Apply(ctx, state)
	if ctx.Err() != nil {
		return err
	}
	a.report(state, err, failing)
	if err == nil {
		f.applied = state
	}
	return err
}

// report tells of a change that was applied, or not; it was is what the attempt
// before has met.
func (a *Agent) report(s rules.State, err, was error) {
	if err == nil {
		a.view.setState(s)
		if !errors.Is(was, errAnew) {
			a.log.WithField("entries", entries(s)).Info("what is diverted has changed")
		}
		return
	}
	a.view.setFailed(err)
	a.metrics.applyFailed.Inc()
	log := a.log.WithError(err)
	if was != nil && !errors.Is(was, errAnew) {
		log.Debug("what is diverted still cannot be changed")
		return
	}
	log.Error("what is diverted could not be changed: the former rules stay, trying again every second")
}

// shutdown undoes divert. The guard of a dead agent stays in force.
func (a *Agent) shutdown(ctx context.Context) error {
	var err error
	phase, _, drain := a.role.get()
	a.role.enter(PhaseStopping)
	a.tell("STOPPING=1")
	if a.choice.Mode != nil {
		err = a.choice.Mode.Close()
		switch {
		case err != nil:
		case phase == PhaseDraining || phase == PhaseDrained:
			a.log.WithField("successor", drain.By).Info("ends; another agent diverts")
		default:
			a.log.WithField(observe.FieldMode, a.choice.Name).Info(afterwards(a.cfg.Agent.Intercept.WhenDown))
		}
	}
	a.listeners.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	switch serr := a.server.Shutdown(ctx); {
	case errors.Is(serr, context.DeadlineExceeded):
		a.log.Info("connections that had not ended were reset")
	case serr != nil:
		err = errors.Join(err, serr)
	}
	return err
}

// afterwards says what clients meet when the agent has stopped.
func afterwards(w rules.WhenDown) string {
	if w == rules.Direct {
		return "no longer diverting: connects pass untouched"
	}
	return "no longer diverting: connects are refused until an agent runs again, or after kasway-agent cleanup pass untouched"
}
