package intercepttest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// What became of one connection of a storm.
type outcome string

const (
	toTarget  outcome = "diverted" // answered by its own target's listener
	toKAS     outcome = "direct"   // answered by the KAS
	refused   outcome = "refused"  // ECONNREFUSED from connect
	mixedUp   outcome = "mixed up" // answered by another target's listener
	failed    outcome = "failed"   // any other error from connect
	brokenOff outcome = "broken"   // connected, and then no answer
)

// record is one connection of a storm.
type record struct {
	cell     cell
	begun    time.Time
	connect  time.Duration // time spent in connect
	finished time.Time
	outcome  outcome
	err      error
}

func (r record) String() string {
	return fmt.Sprintf("%s: %s after %s in connect: %v", r.cell, r.outcome, r.connect.Round(time.Millisecond), r.err)
}

// pace is the time between two connections of one worker. It bounds the load
// on machines that do other work, and the use of source ports.
const pace = 5 * time.Millisecond

// storm is workers that connect without end, each for one cell.
type storm struct {
	workers int
	stop    context.CancelFunc
	wg      sync.WaitGroup
	mu      sync.Mutex
	records []record
}

// newStorm starts one worker for each cell.
func newStorm(cells []cell) *storm {
	ctx, stop := context.WithCancel(context.Background())
	s := &storm{workers: len(cells), stop: stop}
	for _, c := range cells {
		s.wg.Go(func() {
			s.work(ctx, c)
		})
	}
	return s
}

func (s *storm) work(ctx context.Context, c cell) {
	tick := time.NewTicker(pace)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r := once(c)
		s.mu.Lock()
		s.records = append(s.records, r)
		s.mu.Unlock()
	}
}

// Longer than any time that the suite allows, so that it is seen how long a
// connect really blocks; an answer is waited for until a frozen agent's
// clients must have been refused.
const (
	connectLimit = 10 * time.Second
	answerLimit  = 4 * time.Second
)

func once(c cell) record {
	r := record{cell: c, begun: time.Now()}
	d := net.Dialer{Timeout: connectLimit}
	conn, err := c.client.DialWith(context.Background(), &d, "tcp", c.to.addr.String())
	r.connect = time.Since(r.begun)
	if err == nil {
		flow := NewFlow(conn)
		var a Answer
		a, err = flow.Ask(answerLimit)
		flow.End()
		switch {
		case err != nil:
			r.outcome = brokenOff
		case a.Who == direct:
			r.outcome = toKAS
		case a.Who == c.to.target:
			r.outcome = toTarget
		default:
			r.outcome = mixedUp
		}
	} else {
		r.outcome = connectFailed(err)
	}
	r.err, r.finished = err, time.Now()
	return r
}

// connectFailed tells why a connect did not succeed. The runtime looks for the
// result a moment after the kernel has it: ECONNRESET means that the connection
// had been made and was reset by then.
func connectFailed(err error) outcome {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return refused
	case errors.Is(err, syscall.ECONNRESET):
		return brokenOff
	}
	return failed
}

// snapshot is a copy of what has happened so far.
func (s *storm) snapshot() []record {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.records)
}

// end stops the workers and returns everything.
func (s *storm) end() []record {
	s.stop()
	s.wg.Wait()
	return s.records
}

// proceed waits until every worker has finished n connections that began
// after the time, however slow the machine is.
func (s *storm) proceed(after time.Time, n int) error {
	return netns.Poll(20*time.Second, func() error {
		count := map[cell]int{}
		for _, r := range s.snapshot() {
			if r.begun.After(after) {
				count[r.cell]++
			}
		}
		if len(count) < s.workers {
			return fmt.Errorf("%d of %d workers proceed", len(count), s.workers)
		}
		for c, have := range count {
			if have < n {
				return fmt.Errorf("%s: %d connections of %d", c, have, n)
			}
		}
		return nil
	})
}

// verdicts collects what is wrong, a few examples of each kind.
type verdicts struct {
	errs  []error
	count map[string]int
}

func (v *verdicts) add(rule string, r record) {
	if v.count == nil {
		v.count = map[string]int{}
	}
	if v.count[rule]++; v.count[rule] <= 3 {
		v.errs = append(v.errs, fmt.Errorf("%s: %s", rule, r))
	}
}

// only demands that records begun within [from, to) have one of the outcomes;
// a zero time is no bound.
func (v *verdicts) only(rule string, all []record, from, to time.Time, allowed ...outcome) {
	for _, r := range all {
		if (from.IsZero() || !r.begun.Before(from)) && (to.IsZero() || r.begun.Before(to)) && !slices.Contains(allowed, r.outcome) {
			if !from.IsZero() {
				v.add(fmt.Sprintf("%s by %s", rule, r.begun.Sub(from)), r)
				continue
			}
			v.add(rule, r)
		}
	}
}

// never demands that no record has the outcome, at any time.
func (v *verdicts) never(rule string, all []record, what outcome) {
	for _, r := range all {
		if r.outcome == what {
			v.add(rule, r)
		}
	}
}

// maxConnect is how long connect may block, whatever happens to the agent.
const maxConnect = 3 * time.Second

func (v *verdicts) bounded(all []record) {
	for _, r := range all {
		if r.connect > maxConnect {
			v.add(fmt.Sprintf("connect blocked longer than %s", maxConnect), r)
		}
	}
}

// atMost demands that no more than n records have the outcome. Those over the
// limit are shown with their time since the event.
func (v *verdicts) atMost(n int, all []record, what outcome, event time.Time) {
	var some []string
	for _, r := range all {
		if r.outcome == what {
			some = append(some, fmt.Sprintf("begun %s, ended %s: %s", r.begun.Sub(event), r.finished.Sub(event), r))
		}
	}
	if len(some) > n {
		v.errs = append(v.errs, fmt.Errorf("%d connections are %s, more than the %d workers:\n%s", len(some), what, n, strings.Join(some, "\n")))
	}
}

// summary counts outcomes, for the log.
func summary(all []record) string {
	count := map[outcome]int{}
	var longest time.Duration
	for _, r := range all {
		count[r.outcome]++
		longest = max(longest, r.connect)
	}
	return fmt.Sprintf("%d connections %v, longest connect %s", len(all), count, longest.Round(time.Millisecond))
}
