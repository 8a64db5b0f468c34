package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

const (
	// lookInterval is how often it is looked whether all is as it was left: what
	// somebody removes is back within 5 s.
	lookInterval = 2 * time.Second
	// lookShare bounds what looking costs where it takes many commands, and those
	// long: one part of this many of a core.
	lookShare = 10
)

// keeper looks after what an agent that diverts has installed: it has it
// verified, and applied again when somebody has damaged it. It is for the one
// goroutine that uses the mode.
type keeper struct {
	*Agent
	every   time.Duration
	next    *time.Timer
	witness *witness
	wounds  wounds
	blind   bool // what was left could not be looked at the last time
}

// keep starts to look after s; the caller stops it.
func (a *Agent) keep(s rules.State) *keeper {
	prove := func(ctx context.Context) error { return a.selfTest.Prove(ctx, s) }
	every := a.cfg.lookEvery
	if every == 0 {
		every = lookInterval
	}
	k := &keeper{Agent: a, every: every, next: time.NewTimer(every), wounds: wounds{}}
	k.witness = newWitness(prove, a.view.metrics.LateSince, func() { k.next.Reset(0) })
	return k
}

// due tells when it is time to look.
func (k *keeper) due() <-chan time.Time { return k.next.C }

func (k *keeper) stop() {
	k.witness.stop()
	k.next.Stop()
	k.view.setUnheld(nil)
}

// look applies s again if it is damaged. An error, and that of failing, means
// that nobody knows what is installed, and that it is tried again anyhow.
func (k *keeper) look(ctx context.Context, s rules.State, failing error) error {
	if failing != nil {
		k.next.Reset(k.every)
		return failing
	}
	before := spent()
	damage, err := k.damage(ctx)
	pause := max(k.every, lookShare*(spent()-before))
	defer func() { k.next.Reset(pause) }()
	if ctx.Err() != nil {
		return nil
	}
	k.see(err)
	k.tell(damage)
	if len(damage) == 0 {
		return nil
	}
	err = k.mend(ctx, s)
	if ctx.Err() != nil {
		return nil
	}
	k.witness.forget()
	if err != nil {
		k.report(s, err, nil)
		return err
	}
	k.metrics.repairs.WithLabelValues(k.choice.Name).Inc()
	return nil
}

// spent is how long the commands that this process has run have kept a core
// busy. All else that looking takes is next to nothing.
func spent() time.Duration {
	var u unix.Rusage
	if err := unix.Getrusage(unix.RUSAGE_CHILDREN, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// damage is all that is not as it was left, as far as it can be found out.
func (k *keeper) damage(ctx context.Context) (all []intercept.Damage, err error) {
	taken := k.witness.testimony() // before the rest is looked at, which may explain it
	var errs []error
	if !k.placed.fixed { // else they are the mode's
		gone, err := k.addresses.Verify(k.placed.addresses...)
		if all, errs = append(all, gone...), append(errs, err); len(gone) == 0 && err == nil {
			_ = k.view.setAddresses(nil) // what it was does not matter
		}
		all = append(all, k.listeners.Verify()...)
	}
	of, err := k.choice.Mode.Verify(ctx)
	all, errs = append(all, of...), append(errs, err)
	// Beside another agent the connection may have reached that one.
	if taken != nil && len(all) == 0 && len(k.others()) == 0 {
		all = append(all, intercept.Damage{What: taken.Error(), Suspects: suspectTaken})
	}
	return all, errors.Join(errs...)
}

// suspectTaken may take connections away before they reach what is installed.
const suspectTaken = "a rule of somebody else that comes before ours: a nat chain, a jump or a program of Tailscale, Docker, Cilium, Istio or a firewall; a policy route"

// mend puts everything back. What cannot be helped does not keep the rest from
// being mended.
func (k *keeper) mend(ctx context.Context, s rules.State) error {
	if !k.placed.fixed {
		err := k.addresses.Ensure(k.placed.addresses...)
		if was := k.view.setAddresses(err); err != nil && was == nil {
			k.log.WithError(err).Error("the node's addresses cannot be kept: pods are not served")
		}
		if _, err := k.listeners.Set(ctx, k.targets); err != nil {
			return fmt.Errorf("opening the listeners again: %w", err)
		}
	}
	return k.choice.Mode.Apply(ctx, s)
}

// see tells once that it cannot be found out whether all is well.
func (k *keeper) see(err error) {
	switch {
	case err != nil && !k.blind:
		k.log.WithError(err).Error("what is installed cannot be looked after")
	case err == nil && k.blind:
		k.log.Info("what is installed is looked after again")
	}
	if k.blind = err != nil; k.blind {
		k.metrics.verifyFailed.Inc()
	}
}

// tell logs what is new about damage, and shows what does not hold.
func (k *keeper) tell(damage []intercept.Damage) {
	now := time.Now()
	fresh, relapsed := k.wounds.note(damage, now)
	log := k.log.WithField(observe.FieldMode, k.choice.Name)
	if len(fresh) > 0 {
		log.WithFields(describe(fresh)).Warn("somebody has changed what is installed: putting it back")
	}
	if len(relapsed) > 0 {
		log.WithFields(describe(relapsed)).Error("what is put back does not hold: somebody changes it again and again")
	}
	k.view.setUnheld(k.wounds.open(now))
}

// mostNamed bounds what one line of the log names: who flushes a table damages a
// dozen things.
const mostNamed = 8

// describe makes fields of damage, each suspect named once.
func describe(damage []intercept.Damage) logrus.Fields {
	var what, suspects []string
	for i, d := range damage {
		switch {
		case i < mostNamed:
			what = append(what, d.What)
		case i == mostNamed:
			what = append(what, fmt.Sprintf("and %d more", len(damage)-mostNamed))
		}
		if d.Suspects != "" && !slices.Contains(suspects, d.Suspects) {
			suspects = append(suspects, d.Suspects)
		}
	}
	return logrus.Fields{"damage": strings.Join(what, "; "), "suspects": strings.Join(suspects, "; ")}
}

func newRepairs() *prometheus.CounterVec {
	return prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kasway_agent_repairs_total",
		Help: "Times that somebody had changed what the mode has installed, or taken the node's addresses away, and it was put back.",
	}, []string{"mode"})
}

func newVerifyFailed() prometheus.Counter {
	return prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kasway_agent_verify_failures_total",
		Help: "Times that it could not be found out whether what is installed is as it was left; tried again 2 s later.",
	})
}
