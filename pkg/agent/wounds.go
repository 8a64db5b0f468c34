package agent

import (
	"fmt"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
)

const (
	// forgotten is after how long the same damage is news again.
	forgotten = 10 * time.Minute
	// relapse is how soon after it was mended the same damage is one that does
	// not hold, if that comes to pass so often.
	relapse      = time.Minute
	relapseTimes = 3
	// sayAgain is how often such a one is told of.
	sayAgain = 5 * time.Minute
	// healed is after how long without it a node may be ready again.
	healed = 10 * time.Second
)

// wounds remembers damage by what it is.
type wounds map[string]*wound

type wound struct {
	since, last time.Time // of the present row of relapses
	times       int       // in that row
	said        time.Time // that it does not hold; zero: not yet
}

// note takes down the damage found at a time, and sorts out what there is to
// say: of fresh kinds, and of those that come back again and again.
func (w wounds) note(damage []intercept.Damage, now time.Time) (fresh, relapsed []intercept.Damage) {
	for what, one := range w {
		if now.Sub(one.last) > forgotten {
			delete(w, what)
		}
	}
	for _, d := range damage {
		one := w[d.What]
		switch {
		case one == nil:
			one = &wound{since: now}
			w[d.What] = one
			fresh = append(fresh, d)
		case now.Sub(one.last) > relapse:
			one.since, one.times = now, 0
		}
		one.last = now
		if one.times++; one.times >= relapseTimes && now.Sub(one.said) >= sayAgain {
			one.said = now
			relapsed = append(relapsed, d)
		}
	}
	return fresh, relapsed
}

// open is why what is installed cannot be relied on: the worst of what does not
// hold; nil: all does.
func (w wounds) open(now time.Time) (why error) {
	most := relapseTimes - 1
	for what, one := range w {
		if one.times > most && now.Sub(one.last) <= healed {
			most = one.times
			why = fmt.Errorf("what is put back does not hold: %s (%d times since %s)", what, one.times, one.since.Format(time.TimeOnly))
		}
	}
	return why
}
