package agent

import (
	"context"
	"net"
	"net/netip"
	"slices"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

const (
	// othersLook is how often an agent that waits looks whether those it waits
	// for still live.
	othersLook = 500 * time.Millisecond
	// lockWithin bounds how long an agent waits for another that installs
	// itself: it may be frozen.
	lockWithin = 15 * time.Second
	// answerWithin bounds the wait for an agent that is to stand down. One whose
	// node has 50,000 iptables rules takes seconds; one of version 0.1 never
	// answers.
	answerWithin = 5 * time.Second
)

// takeover is an agent's way in beside those that live on its node already: they
// go on until it is proven, and it makes them stand down then. What it asks of
// them is in force until close.
type takeover struct {
	*Agent
	asked map[string]*intercept.Asked
	// sockets are the listeners that an agent of mode listen hands over.
	sockets []*intercept.Asked
	// trying is the mode that is being tried.
	trying string
	stop   func() // ends what relieve has begun; nil: nothing
}

// others are the agents beside this one. What cannot be found out is not there.
func (a *Agent) others() []string {
	all, err := intercept.Others(a.cfg.Generation)
	if err != nil {
		a.log.WithError(err).Warn("whether another agent runs on this node cannot be found out")
	}
	return all
}

// turn waits until it is this agent's turn to install itself, and returns how
// to let the next one. Meanwhile others are told that it comes after them.
func (t *takeover) turn(ctx context.Context) (next func(), err error) {
	quit, done := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(done)
		for {
			select {
			case r := <-t.presence.Requests():
				_ = r.No(noStarting) // the other sees to itself
			case <-quit:
				return
			}
		}
	}()
	t.waitForWay(ctx)
	next = t.lock(ctx)
	close(quit)
	<-done
	if t.stamp, err = intercept.Stamp(); err == nil {
		err = ctx.Err()
	}
	return next, err
}

// waitForWay waits for a link while another agent is there to carry: connects
// are diverted to this one from its first Apply on.
func (t *takeover) waitForWay(ctx context.Context) {
	tick := time.NewTicker(othersLook)
	defer tick.Stop()
	defer t.role.waiting("")
	for said := false; ; {
		changed := t.cfg.Links.Changed()
		if slices.ContainsFunc(t.cfg.Links.Status(), func(l LinkStatus) bool { return l.State == LinkUp }) {
			return
		}
		others := t.others()
		if len(others) == 0 {
			return
		}
		t.role.waiting("waiting for a link before it takes over from " + among(others))
		if !said {
			said = true
			t.log.WithField("agents", others).Info("another agent runs on this node: taking over from it once a link is up")
		}
		select {
		case <-changed:
		case <-tick.C:
		case <-ctx.Done():
			return
		}
	}
}

// lock keeps two agents that start at the same moment from proving themselves
// at once: each would take the other's self-test for its own failure.
func (t *takeover) lock(ctx context.Context) (unlock func()) {
	ctx, cancel := context.WithTimeout(ctx, lockWithin)
	defer cancel()
	unlock, err := t.addresses.Lock(ctx)
	if err != nil {
		t.log.WithError(err).Warn("not knowing whether another agent starts at this moment")
		return func() {}
	}
	return unlock
}

// inherit asks the others for their listeners, which in mode listen are at the
// very addresses that this agent wants.
func (t *takeover) inherit(ctx context.Context) {
	if !t.placed.fixed {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	for _, g := range t.others() {
		asked, err := intercept.Ask(ctx, g, intercept.Line{Verb: intercept.VerbListeners, Generation: t.cfg.Generation})
		if err == nil {
			t.sockets = append(t.sockets, asked)
			_, err = asked.Answer(ctx)
		}
		if err != nil {
			t.log.WithError(err).Warn("another agent does not hand over its listeners")
		}
	}
}

func (t *takeover) inherited(at netip.AddrPort) *net.TCPListener {
	for _, s := range t.sockets {
		if l := s.Take(at); l != nil {
			return l
		}
	}
	return nil
}

// dropSockets closes the listeners that nobody wanted.
func (t *takeover) dropSockets() {
	for _, s := range t.sockets {
		s.Close()
	}
	t.sockets = nil
}

// candidates are those of a, and let t know which one is tried.
func (t *takeover) candidates() []intercept.Candidate {
	try := slices.Clone(t.view.try)
	for i, c := range try {
		try[i].New = func() (intercept.Mode, error) {
			t.trying = c.Name
			return c.New()
		}
	}
	return try
}

// prove is the self-test. An agent that diverts by another mode may stand before
// us: then it stands down for the proof, and diverts again should that fail.
func (t *takeover) prove(ctx context.Context, s rules.State) error {
	err := t.selfTest.Prove(ctx, s)
	if err == nil || ctx.Err() != nil || len(t.others()) == 0 {
		return err
	}
	t.log.WithError(err).Info("the other agent diverts before this one: letting it stand down")
	t.ask(ctx, t.trying)
	t.answers(ctx)
	if err = t.selfTest.Prove(ctx, s); err != nil {
		t.close()
	}
	return err
}

// ask asks every other agent to stand down that has not been asked yet.
func (t *takeover) ask(ctx context.Context, mode string) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	for _, g := range t.others() {
		if t.asked[g] != nil {
			continue
		}
		asked, err := intercept.Ask(ctx, g, intercept.Line{
			Verb: intercept.VerbStandDown, Generation: t.cfg.Generation, Mode: mode, Stamp: t.stamp,
		})
		if err != nil {
			t.log.WithError(err).Warn("another agent cannot be asked to stand down")
			continue
		}
		t.asked[g] = asked
	}
}

// answers waits for what those that were asked have to say.
func (t *takeover) answers(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, answerWithin)
	defer cancel()
	for g, asked := range t.asked {
		log := t.log.WithField("predecessor", g)
		switch l, err := asked.Answer(ctx); {
		case ctx.Err() != nil && err != nil:
			log.Warn("the agent before does not answer, as those of version 0.1: it goes on beside this one until it is stopped")
		case err != nil:
			log.WithError(err).Debug("the agent before has ended")
		case l.Verb == intercept.VerbYes:
			log.Info("taken over: the agent before has stood down")
		default:
			log.WithField("why", l.Word).Info("another agent starts after this one, and will take over")
		}
	}
}

// handover is what follow is told of the agents before.
type handover struct {
	answered <-chan struct{} // they have stood down, or never will
	gone     <-chan struct{} // they have ended
}

// relieve makes the others stand down, beside the caller.
func (t *takeover) relieve(life context.Context, mode string) handover {
	others := t.others()
	if len(others) == 0 && len(t.asked) == 0 {
		return handover{}
	}
	t.role.waiting("taking over from " + among(others))
	life, cancel := context.WithCancel(life)
	answered, gone, done := make(chan struct{}), make(chan struct{}), make(chan struct{})
	t.stop = func() { cancel(); <-done }
	go func() {
		defer close(done)
		t.ask(life, mode)
		t.answers(life)
		t.role.waiting("")
		close(answered)
		for _, a := range t.asked {
			select {
			case <-a.Gone():
			case <-life.Done():
				return
			}
		}
		close(gone)
	}()
	return handover{answered, gone}
}

// close takes back what was asked for: agents that live divert again.
func (t *takeover) close() {
	if t.stop != nil {
		t.stop()
	}
	for g, a := range t.asked {
		a.Close()
		delete(t.asked, g)
	}
	t.dropSockets()
}

// newTakeover makes one that has asked for nothing yet.
func newTakeover(a *Agent) *takeover {
	return &takeover{Agent: a, asked: map[string]*intercept.Asked{}}
}
