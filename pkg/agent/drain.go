package agent

import (
	"context"
	"errors"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
)

const (
	// settle is how long a superseded agent waits at least: connects that were
	// diverted to it just before are still on their way.
	settle = time.Second
	// quietFor tells a connection between two requests from one amid them.
	quietFor = 2 * time.Second
	// drainLook is how often it is looked which connections are left.
	drainLook = 250 * time.Millisecond
)

// errDrained is why what is left after the grace is reset.
var errDrained = errors.New("another agent has taken over, and the grace is over")

// drain ends what a superseded agent holds: it leaves all alone for the grace,
// then resets one after the other, evenly over the spread, always the one that
// has been quiet for longest. Connections of KAS clients never end by
// themselves, and cut at a quiet moment are resumed without a relist; each makes
// as many new ones as it has watches, so that they must not come all at once.
type drain struct {
	conns  func() []*intercept.Carried
	count  func(reason string)
	report func(DrainStatus)

	status DrainStatus
	seen   map[*intercept.Carried]bool // reset already?
}

func newDrain(by string, grace, spread time.Duration, conns func() []*intercept.Carried) *drain {
	now := time.Now()
	resets := now.Add(grace)
	return &drain{
		conns: conns, count: func(string) {}, report: func(DrainStatus) {},
		status: DrainStatus{By: by, Since: now, Resets: resets, Ends: resets.Add(spread)},
		seen:   map[*intercept.Carried]bool{},
	}
}

// run returns when nothing is left, or ctx ends.
func (d *drain) run(ctx context.Context) {
	var next time.Time // of the next reset; zero: not known yet
	for {
		left := d.look()
		now := time.Now()
		if len(left) == 0 && now.Sub(d.status.Since) >= settle {
			return
		}
		if !now.Before(d.status.Resets) && len(left) > 0 {
			if next.IsZero() {
				next = d.slot(now, d.status.Resets, len(left))
			}
			if !now.Before(next) && d.reset(left) {
				next = d.slot(now, now, len(left)-1)
				continue
			}
		}
		pause := drainLook
		for _, at := range []time.Time{next, d.status.Resets} {
			if until := at.Sub(now); until > 0 {
				pause = min(pause, until)
			}
		}
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return
		}
	}
}

// slot is when to reset the next of n, the last at the end.
func (d *drain) slot(now, from time.Time, n int) time.Time {
	if n == 0 {
		return time.Time{} // of one that comes late
	}
	if !now.Before(d.status.Ends) {
		return now
	}
	return from.Add(d.status.Ends.Sub(from) / time.Duration(n))
}

// look finds out what is left, and counts what has ended by itself.
func (d *drain) look() (left []*intercept.Carried) {
	now := map[*intercept.Carried]bool{}
	for _, c := range d.conns() {
		reset := d.seen[c]
		if now[c] = reset; !reset {
			left = append(left, c)
		}
	}
	for c, reset := range d.seen {
		if _, there := now[c]; !there && !reset {
			d.status.Ended++
			d.count(drainedEnded)
		}
	}
	d.seen = now
	d.status.Connections = len(left)
	d.report(d.status)
	return left
}

// reset resets the one that has been quiet for longest. It does nothing if all
// of them are just ending.
func (d *drain) reset(left []*intercept.Carried) bool {
	var (
		chosen *intercept.Carried
		quiet  time.Duration
	)
	for _, c := range left {
		t, ok := c.Traffic()
		if ok && (chosen == nil || t.Quiet > quiet) {
			chosen, quiet = c, t.Quiet
		}
	}
	if chosen == nil {
		return false
	}
	d.seen[chosen] = true
	d.status.Reset++
	if quiet >= quietFor {
		d.count(drainedQuiet)
	} else {
		d.count(drainedBusy)
	}
	chosen.Abort(errDrained)
	return true
}
