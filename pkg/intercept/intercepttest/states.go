package intercepttest

import (
	"errors"
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// RunStates changes the state under a storm: open → refused → open, and the
// set of targets 20 times. From the return of Apply on connects meet the new
// state; not one reaches the KAS or fails in another way.
func RunStates(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	t.Run("refused", func(t *testing.T) {
		w := build(t, f.node(netns.IptablesNFT))
		report(t, w.refuseAndOpen(start(t, w, f), f))
	})
	t.Run("replaced", func(t *testing.T) {
		w := build(t, f.node(netns.IptablesNFT))
		report(t, w.replace(start(t, w, f), f))
	})
}

func report(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}

// refuse marks every target of s as refused.
func refuse(s rules.State) rules.State {
	for i := range s.Diverts {
		s.Diverts[i].Refused = true
	}
	return s
}

func (w *world) refuseAndOpen(h *Holder, f Factory) error {
	if _, err := h.Apply(firstState(f)); err != nil {
		return err
	}
	s := newStorm(w.taken(f, "kas", "other"))
	var at [5]time.Time // began and ended closing, began and ended opening
	var err error
	step := func(i int, state rules.State) {
		at[i] = time.Now()
		if err == nil {
			_, err = h.Apply(state)
		}
		at[i+1] = time.Now()
		err = errors.Join(err, s.proceed(at[i+1], 10))
	}
	err = s.proceed(time.Time{}, 10)
	step(0, refuse(firstState(f)))
	step(2, firstState(f))
	all := s.end()
	if err != nil {
		return err
	}
	v := &verdicts{}
	v.bounded(all)
	v.only("open", finishedBefore(all, at[0]), time.Time{}, time.Time{}, toTarget)
	closing := []outcome{toTarget, refused}
	if f.Places != nil {
		closing = append(closing, brokenOff) // whom a listener that closes had in its backlog
	}
	v.only("being refused", all, time.Time{}, at[1], closing...)
	v.atMost(s.workers, all, brokenOff, at[0])
	v.only("refused", finishedBefore(all, at[2]), at[1], at[2], refused)
	v.only("being opened", all, at[2], at[3], toTarget, refused)
	v.only("open again", all, at[3], time.Time{}, toTarget)
	return errors.Join(append(v.errs, h.Close(), h.Cleanup(), h.End())...)
}

// replace turns the targets' order round and adds and removes a third one.
func (w *world) replace(h *Holder, f Factory) error {
	s, err := h.Apply(firstState(f))
	if err != nil {
		return err
	}
	storm := newStorm(w.taken(f, "kas", "other"))
	err = storm.proceed(time.Time{}, 10)
	v := &verdicts{}
	for i := 0; err == nil && i < 20 && len(v.errs) == 0; i++ {
		next := s
		next.Diverts = []rules.Divert{s.Diverts[1], s.Diverts[0]}
		if i%2 == 1 {
			next = s
		} else {
			next.Diverts = append(next.Diverts, rules.Divert{Name: "third", Entries: []rules.Entry{{Prefix: single(netns.KAS4), Port: 7443}}})
		}
		if _, err = h.Apply(next); err != nil {
			err = fmt.Errorf("replacement %d: %w", i, err)
		} else {
			err = storm.proceed(time.Now(), 2)
		}
		v.only("while targets are replaced", storm.snapshot(), time.Time{}, time.Time{}, toTarget)
	}
	all := storm.end()
	if err != nil {
		return errors.Join(append(v.errs, err)...)
	}
	if len(v.errs) == 0 {
		v.only("while targets are replaced", all, time.Time{}, time.Time{}, toTarget)
	}
	v.bounded(all)
	return errors.Join(append(v.errs, h.Close(), h.Cleanup(), h.End())...)
}

// RunExisting: connections that were made before the first Apply go on to the
// KAS, untouched, whether or not the node tracked them (without a kube-proxy
// nothing does); connections that were taken live on after Close.
func RunExisting(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	for _, proxy := range []netns.KubeProxy{netns.NoKubeProxy, netns.IptablesNFT} {
		n := f.node(proxy)
		if f.refuses(n) != "" {
			continue // as the matrix proves
		}
		t.Run("kube-proxy="+string(proxy), func(t *testing.T) {
			w := build(t, n)
			report(t, w.existing(start(t, w, f), f))
		})
	}
}

func (w *world) existing(h *Holder, f Factory) error {
	flows := map[cell]*Flow{}
	defer func() {
		for _, flow := range flows {
			flow.End()
		}
	}()
	connectAll := func(cells []cell) (err error) {
		for _, c := range cells {
			if flows[c], err = Connect(c.client, c.to.addr, false, patience); err != nil {
				delete(flows, c)
				return fmt.Errorf("%s: %w", c, err)
			}
		}
		return nil
	}
	askAll := func(when, who string) (errs []error) {
		results := make(chan error, len(flows))
		for c, flow := range flows {
			go func() {
				a, err := flow.Ask(patience)
				if err == nil && a.Who != who {
					err = fmt.Errorf("%s answers, want %s", a.Who, who)
				}
				if err != nil {
					err = fmt.Errorf("%s: %s: %w", when, c, err)
				}
				results <- err
			}()
		}
		for range flows {
			errs = append(errs, <-results)
		}
		return errs
	}
	if err := connectAll(w.cells("kas")); err != nil {
		return err
	}
	errs := askAll("before", direct)
	if _, err := h.Apply(firstState(f)); err != nil {
		return err
	}
	errs = append(errs, askAll("made before Apply", direct)...)
	for _, flow := range flows {
		flow.End()
	}
	clear(flows)
	if err := connectAll(w.taken(f, "kas")); err != nil {
		return err
	}
	errs = append(errs, askAll("diverted", "kas")...)
	errs = append(errs, h.Close())
	errs = append(errs, askAll("after Close", "kas")...)
	return errors.Join(append(errs, h.Cleanup(), h.End())...)
}

// RunOwnMark: sockets with the mark reach the KAS while everybody else's are
// diverted, and while they are refused. It does not apply to modes that
// divert nothing.
func RunOwnMark(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	if f.Places != nil {
		t.Fatalf("mode %s diverts nothing that a mark could exempt", f.Name)
	}
	for _, proxy := range netns.KubeProxies {
		n := f.node(proxy)
		if f.refuses(n) != "" {
			continue // as the matrix proves
		}
		t.Run("kube-proxy="+string(proxy), func(t *testing.T) {
			w := build(t, n)
			report(t, w.ownMark(start(t, w, f), f))
		})
	}
}

func (w *world) ownMark(h *Holder, f Factory) (err error) {
	var errs []error
	for _, s := range []rules.State{firstState(f), refuse(firstState(f))} {
		if _, err := h.Apply(s); err != nil {
			return err
		}
		for _, c := range w.cells("kas") {
			if c.pod {
				continue // our sockets are in the node's namespace
			}
			a, _, err := ask(c.client, c.to.addr, true)
			if err == nil {
				err = isDirect(c, a)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("marked socket, targets refused=%t: %s: %w", s.Diverts[0].Refused, c, err))
			}
			_, _, err = ask(c.client, c.to.addr, false)
			if s.Diverts[0].Refused != errors.Is(err, syscall.ECONNREFUSED) {
				errs = append(errs, fmt.Errorf("plain socket, targets refused=%t: %s: %w", s.Diverts[0].Refused, c, err))
			}
		}
	}
	return errors.Join(append(errs, h.Close(), h.Cleanup(), h.End())...)
}
