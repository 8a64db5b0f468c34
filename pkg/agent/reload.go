package agent

import (
	"context"
	"fmt"
	"os"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
)

// reloadWithin is how long a successor may take until it is proven and has
// taken over; after that it is given up.
const reloadWithin = 60 * time.Second

// Child is a process that this agent has started as its successor.
type Child struct {
	PID int
	// Ended gets how it has ended, once.
	Ended <-chan error
	// Stop asks it to end.
	Stop func()
}

// Manager is the service manager, as far as it is told what becomes of the
// agent. The states are those of sd_notify(3).
type Manager func(states ...string)

// child is a successor that a reload has started.
type child struct {
	Child
	late <-chan time.Time // when it is given up; nil: it has taken over
}

// reload starts a successor beside this agent. If that comes up it takes over,
// as any other would; if not, nothing has happened but a line in the log.
func (a *Agent) reload() {
	if a.child != nil {
		a.log.Warn("reload: one is under way already")
		return
	}
	if a.cfg.Spawn == nil {
		a.log.Warn("reload: this agent cannot start another one")
		return
	}
	a.tell("RELOADING=1", "STATUS=starting the agent that is to take over")
	c, err := a.cfg.Spawn()
	if err != nil {
		a.reloadFailed(fmt.Errorf("it cannot be started: %w", err))
		return
	}
	a.child = &child{Child: c, late: time.After(reloadWithin)}
	a.log.WithField("pid", c.PID).Info("reload: another agent starts, and takes over once it is proven")
}

// reloadFailed says that this agent goes on.
func (a *Agent) reloadFailed(err error) {
	a.log.WithError(err).Error("reload: the new agent does not take over, this one goes on")
	a.tell("READY=1", fmt.Sprintf("STATUS=the last reload failed: %v; diverting by %s", err, a.choice.Name))
}

// childEnded gets how the successor has ended; nil: there is none.
func (a *Agent) childEnded() <-chan error {
	if a.child == nil {
		return nil
	}
	return a.child.Ended
}

// childLate is when the successor is given up; nil: never.
func (a *Agent) childLate() <-chan time.Time {
	if a.child == nil {
		return nil
	}
	return a.child.late
}

// childHasEnded is for one that has ended before it took over.
func (a *Agent) childHasEnded(err error) {
	if err == nil {
		err = fmt.Errorf("exit status 0")
	}
	late := a.child.late == nil
	a.child = nil
	if !late {
		a.reloadFailed(fmt.Errorf("it has ended (%w); its own lines say why", err))
	}
}

// childIsLate gives a successor up.
func (a *Agent) childIsLate() {
	a.child.late = nil
	a.child.Stop()
	a.reloadFailed(fmt.Errorf("it has not taken over within %s", reloadWithin))
}

// tell tells the manager, if this agent is its main process.
func (a *Agent) tell(states ...string) {
	if a.main {
		a.cfg.Manager(states...)
	}
}

// handOver makes the successor the service manager's main process, if it is the
// one that a reload has started.
func (a *Agent) handOver(r *intercept.Request) {
	if a.child == nil || r.PID != a.child.PID {
		return
	}
	a.tell(fmt.Sprintf("MAINPID=%d", a.child.PID), "READY=1", "STATUS=diverting by "+r.Mode)
	a.child.late, a.handedOver, a.main = nil, true, false
	a.log.WithField("pid", a.child.PID).Info("reload: handed over")
}

// resume is for an agent that is to divert again.
func (a *Agent) resume(ctx context.Context) {
	a.log.Info("diverting again")
	if a.placed.fixed {
		if err := a.listeners.Refuse(ctx, nil); err != nil {
			a.log.WithError(err).Error("the listeners cannot be opened again yet")
		}
	}
	a.role.draining(DrainStatus{})
	a.role.enter(PhaseDiverting)
	if a.handedOver {
		a.handedOver, a.main = false, true
		a.tell(fmt.Sprintf("MAINPID=%d", os.Getpid()), "READY=1", "STATUS=diverting again by "+a.choice.Name)
	}
}

// dropChild ends a successor that has not taken over, when this agent ends.
func (a *Agent) dropChild() {
	if a.child != nil && !a.handedOver {
		a.child.Stop()
	}
}
