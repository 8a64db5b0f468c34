package intercept

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// GateState says whether a target can be carried at this moment.
type GateState int

const (
	// Held: taken connections wait. A target that nothing is known of yet is
	// held.
	Held GateState = iota
	// Open: they pass.
	Open
	// Refused: they are reset at once.
	Refused
)

// String implements fmt.Stringer.
func (s GateState) String() string {
	return [...]string{"held", "open", "refused"}[s]
}

// Held connections are let go over this time when a way opens, so that a server
// that has just come back does not meet all of them at once.
const releaseOver = time.Second

// DefaultMaxHeld bounds the held connections of all targets together.
const DefaultMaxHeld = 4096

// Gates holds connections while their target cannot be carried. It is safe for
// concurrent use.
type Gates struct {
	metrics *Metrics
	max     int
	over    time.Duration

	mu    sync.Mutex
	gates map[string]*gate
	held  int
}

// gate is one target's. waiting is ordered by arrival; while the gate is open
// it is being emptied by pacer.
type gate struct {
	state   GateState
	waiting []*waiter
	pacer   *time.Timer
}

// waiter is one held connection; done is closed when err is decided.
type waiter struct {
	done     chan struct{}
	err      error
	deadline time.Time
}

// NewGates makes gates that are all Held, for at most maxHeld connections.
func NewGates(maxHeld int, m *Metrics) *Gates {
	return &Gates{metrics: orUnregistered(m), max: maxHeld, over: releaseOver, gates: map[string]*gate{}}
}

// Set changes the state of one target; setting it to what it is does nothing.
// Connections held so far are let go over a second, the oldest first, when the
// state becomes Open, and fail when it becomes Refused.
func (g *Gates) Set(target string, s GateState) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := g.of(target)
	if t.state == s {
		return
	}
	t.state = s
	if t.pacer != nil {
		t.pacer.Stop()
		t.pacer = nil
	}
	switch s {
	case Open:
		if n := len(t.waiting); n > 0 {
			g.release(t, g.over/time.Duration(n))
		}
	case Held:
		// Closed again while it was emptied: some have waited for too long.
		now := time.Now()
		for _, w := range slices.Clone(t.waiting) {
			if !now.Before(w.deadline) {
				g.leave(t, w, ErrHeldTooLong)
			}
		}
	case Refused:
		for _, w := range slices.Clone(t.waiting) {
			g.leave(t, w, ErrClosedGate)
		}
	}
}

// State is the present state of a target.
func (g *Gates) State(target string) GateState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.of(target).state
}

// Wait returns nil when target may be dialled: at once while it is Open. It
// fails with ErrHeldTooLong at the deadline, with ErrClosedGate when the target
// is Refused, with dial.ErrLimit if too many are held, and with ctx's cause when
// ctx ends. A connection whose turn is near when the deadline comes, because the
// way is open again, still gets it.
func (g *Gates) Wait(ctx context.Context, target string, deadline time.Time) error {
	t, w, err := g.enter(target, deadline)
	if w == nil {
		return err
	}
	expired := time.NewTimer(time.Until(deadline))
	defer expired.Stop()
	for {
		select {
		case <-w.done:
			return w.err
		case <-ctx.Done():
			g.decide(t, w, func() bool { return true }, context.Cause(ctx))
		case <-expired.C:
			g.decide(t, w, func() bool { return t.state != Open }, ErrHeldTooLong)
		}
	}
}

// enter queues a connection, unless its fate is known at once.
func (g *Gates) enter(target string, deadline time.Time) (*gate, *waiter, error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	t := g.of(target)
	switch {
	case t.state == Open:
		return nil, nil, nil
	case t.state == Refused:
		return nil, nil, ErrClosedGate
	case !time.Now().Before(deadline):
		return nil, nil, ErrHeldTooLong
	case g.held >= g.max:
		return nil, nil, fmt.Errorf("%w: %d connections are held already", dial.ErrLimit, g.held)
	}
	w := &waiter{done: make(chan struct{}), deadline: deadline}
	t.waiting = append(t.waiting, w)
	g.held++
	g.metrics.held.Inc()
	return t, w, nil
}

// decide ends w with err if it is still waiting and when holds.
func (g *Gates) decide(t *gate, w *waiter, when func() bool, err error) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if slices.Contains(t.waiting, w) && when() {
		g.leave(t, w, err)
	}
}

// release lets the oldest go and comes back for the next one. mu is held.
func (g *Gates) release(t *gate, pace time.Duration) {
	g.leave(t, t.waiting[0], nil)
	if len(t.waiting) == 0 {
		t.pacer = nil
		return
	}
	var timer *time.Timer
	timer = time.AfterFunc(pace, func() {
		g.mu.Lock()
		defer g.mu.Unlock()
		// The gate may have closed, or the last client have gone, since.
		if t.pacer == timer && len(t.waiting) > 0 {
			g.release(t, pace)
		}
	})
	t.pacer = timer
}

// leave takes w out of the queue and decides it. mu is held.
func (g *Gates) leave(t *gate, w *waiter, err error) {
	i := slices.Index(t.waiting, w)
	t.waiting = slices.Delete(t.waiting, i, i+1)
	g.held--
	g.metrics.held.Dec()
	w.err = err
	close(w.done)
}

func (g *Gates) of(target string) *gate {
	t := g.gates[target]
	if t == nil {
		t = &gate{}
		g.gates[target] = t
	}
	return t
}
