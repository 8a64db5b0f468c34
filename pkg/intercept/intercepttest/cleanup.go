package intercepttest

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// maxCleanup is how long Cleanup may take.
const maxCleanup = 5 * time.Second

// RunCleanup: after Close the dead-agent guard stays in force where WhenDown
// is refuse, and only then; Cleanup leaves the node as it was, after Close and
// after kill -9, with every kube-proxy's rules in place, in less than 5 s, and
// any number of times. FULL=1 in the environment runs every combination, else
// each pair of kube-proxy, WhenDown and way to end is met once.
func RunCleanup(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	for i, proxy := range netns.KubeProxies {
		n := f.node(proxy)
		if f.refuses(n) != "" {
			continue // as the matrix proves
		}
		for j, when := range f.whenDown() {
			for k, kill := range []bool{false, true} {
				if os.Getenv("FULL") != "1" && (i+j+k)%2 == 1 {
					continue // half of the cells hold every pair
				}
				t.Run(fmt.Sprintf("kube-proxy=%s/%s/kill=%t", proxy, when, kill), func(t *testing.T) {
					t.Parallel()
					w := build(t, n)
					report(t, w.cleanup(t, f, when, kill))
				})
			}
		}
	}
}

func (w *world) cleanup(t *testing.T, f Factory, when rules.WhenDown, kill bool) error {
	before, err := w.snapshot()
	if err != nil {
		return err
	}
	h := start(t, w, f)
	if _, err := h.Apply(State(when)); err != nil {
		return err
	}
	var errs []error
	if kill {
		if err := h.Kill(); err != nil {
			return err
		}
		h = start(t, w, f)
	} else {
		if err := h.Close(); err != nil {
			return err
		}
		for _, c := range w.taken(f, "kas") {
			if err := closed(c, when); err != nil {
				errs = append(errs, fmt.Errorf("after Close: %s: %w", c, err))
			}
		}
	}
	for range 2 {
		begun := time.Now()
		errs = append(errs, h.Cleanup())
		if took := time.Since(begun); took > maxCleanup {
			errs = append(errs, fmt.Errorf("cleanup took %s", took))
		}
	}
	for _, c := range w.cells("kas", "other") {
		if err := reachesKAS(c); err != nil {
			errs = append(errs, fmt.Errorf("after Cleanup: %s: %w", c, err))
		}
	}
	return errors.Join(append(errs, h.End(), leftovers(w, before))...)
}

// closed is what a cell meets once the mode has been closed.
func closed(c cell, when rules.WhenDown) error {
	if when == rules.Direct {
		return reachesKAS(c)
	}
	flow, err := Connect(c.client, c.to.addr, false, patience)
	if err == nil {
		flow.End()
		return errors.New("connected, want ECONNREFUSED")
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("want ECONNREFUSED: %w", err)
	}
	return nil
}
