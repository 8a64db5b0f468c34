package intercept

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// result is when and how one Wait ended.
type result struct {
	client int
	after  time.Duration
	err    error
}

// results are those of waiters, in the order in which they ended.
type results struct {
	mu  sync.Mutex
	all []result
}

// list waits until nothing more can end at this moment.
func (r *results) list() []result {
	synctest.Wait()
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.Clone(r.all)
}

// waiters calls Wait for clients 0 to n-1, each a millisecond after the one
// before.
func waiters(ctx context.Context, g *Gates, n int, hold time.Duration) *results {
	r := &results{}
	for i := range n {
		deadline := time.Now().Add(hold)
		go func() {
			start := time.Now()
			err := g.Wait(ctx, "kas", deadline)
			r.mu.Lock()
			defer r.mu.Unlock()
			r.all = append(r.all, result{i, time.Since(start), err})
		}()
		time.Sleep(time.Millisecond)
	}
	return r
}

func TestGateReleasesOldestFirstOverASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		m, v := metrics(t)
		g := NewGates(100, m)
		got := waiters(t.Context(), g, 10, 5*time.Second)
		if v.of("held") != 10 {
			t.Errorf("%v held, want 10", v.of("held"))
		}
		g.Set("kas", Open)
		if len(got.list()) != 1 {
			t.Errorf("%d let go at once, want 1", len(got.list()))
		}
		time.Sleep(500 * time.Millisecond)
		if n := len(got.list()); n != 6 {
			t.Errorf("%d let go after half a second, want 6 of 10", n)
		}
		if err := g.Wait(t.Context(), "kas", time.Now()); err != nil {
			t.Errorf("a new connection at the open gate: %v", err)
		}
		time.Sleep(500 * time.Millisecond)
		for i, r := range got.list() {
			if r.client != i || r.err != nil {
				t.Errorf("%d. to go was client %d, %v", i, r.client, r.err)
			}
		}
		if len(got.list()) != 10 || v.of("held") != 0 {
			t.Errorf("%d let go, %v held at the end", len(got.list()), v.of("held"))
		}
	})
}

func TestGateEndsTheWaitAtTheDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGates(100, nil)
		got := waiters(t.Context(), g, 1, 5*time.Second)
		time.Sleep(6 * time.Second)
		r := got.list()[0]
		if !errors.Is(r.err, ErrHeldTooLong) || r.after != 5*time.Second {
			t.Errorf("%v after %v, want ErrHeldTooLong after 5 s", r.err, r.after)
		}
	})
}

// A connection must not be reset because it waits for its turn at a gate that
// is open again, and must be if the gate closes before.
func TestGateDeadlineDuringRelease(t *testing.T) {
	for name, reclose := range map[string]bool{"stays open": false, "closes again": true} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				g := NewGates(100, nil)
				got := waiters(t.Context(), g, 10, 2*time.Second)
				time.Sleep(1900 * time.Millisecond)
				g.Set("kas", Open)
				time.Sleep(450 * time.Millisecond)
				if reclose {
					g.Set("kas", Held)
				}
				time.Sleep(5 * time.Second)
				failed := slices.IndexFunc(got.list(), func(r result) bool { return r.err != nil })
				if !reclose && failed >= 0 || reclose && failed != 5 || len(got.list()) != 10 {
					t.Errorf("first failure is %d of %v", failed, got.list())
				}
			})
		})
	}
}

func TestGateRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGates(100, nil)
		got := waiters(t.Context(), g, 3, 5*time.Second)
		g.Set("kas", Refused)
		for _, r := range got.list() {
			if !errors.Is(r.err, ErrClosedGate) {
				t.Errorf("held one: %v", r.err)
			}
		}
		if err := g.Wait(t.Context(), "kas", time.Now().Add(time.Hour)); len(got.list()) != 3 || !errors.Is(err, ErrClosedGate) {
			t.Errorf("%d ended; a new one: %v", len(got.list()), err)
		}
		g.Set("other", Open)
		if g.State("kas") != Refused || g.State("other") != Open || g.State("unheard") != Held {
			t.Error("targets are not apart")
		}
	})
}

func TestGateBoundsTheHeld(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g := NewGates(2, nil)
		ctx, cancel := context.WithCancelCause(t.Context())
		got := waiters(ctx, g, 2, 5*time.Second)
		if err := g.Wait(t.Context(), "other", time.Now().Add(time.Second)); !errors.Is(err, dial.ErrLimit) {
			t.Errorf("the third of two: %v", err)
		}
		cancel(ErrClientGone)
		if len(got.list()) != 2 || !errors.Is(got.list()[0].err, ErrClientGone) {
			t.Errorf("after the clients went: %v", got.list())
		}
		again := waiters(t.Context(), g, 2, time.Second)
		time.Sleep(2 * time.Second)
		if len(again.list()) != 2 || errors.Is(again.list()[0].err, dial.ErrLimit) {
			t.Errorf("places were not given back: %v", again.list())
		}
	})
}
