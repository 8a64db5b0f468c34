package intercepttest

import (
	"errors"
	"fmt"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// settle is the time within which the state of WhenDown must hold.
const settle = 3 * time.Second

// RunDeath kills and freezes the agent under a storm of connections, for every
// WhenDown of the mode: within 3 s connects are refused (by ECONNREFUSED and
// nothing else, and never reach the KAS before) or reach the KAS; no connect
// blocks longer; no worker loses more than what it has in flight.
// A thawed agent diverts again by itself, a new one after its first Apply, and
// Cleanup gives everything back.
func RunDeath(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	for _, when := range f.whenDown() {
		for name, signal := range map[string]syscall.Signal{"SIGKILL": syscall.SIGKILL, "SIGSTOP": syscall.SIGSTOP} {
			t.Run(string(when)+"/"+name, func(t *testing.T) {
				t.Parallel()
				w := build(t, f.node(netns.IptablesNFT))
				summary, err := w.death(t, f, when, signal)
				t.Log(summary)
				if err != nil {
					t.Error(err)
				}
			})
		}
	}
}

// death runs one case and judges it.
func (w *world) death(t *testing.T, f Factory, when rules.WhenDown, signal syscall.Signal) (string, error) {
	before, err := w.snapshot()
	if err != nil {
		return "", err
	}
	h := start(t, w, f)
	if _, err := h.Apply(State(when)); err != nil {
		return "", err
	}
	storm := newStorm(w.taken(f, "kas"))
	d, err := w.strike(t, storm, h, f, when, signal)
	all := storm.end()
	v := d.judge(all, when)
	if err != nil {
		return summary(all), errors.Join(append(v.errs, err)...)
	}
	v.errs = append(v.errs, w.attached(f.Hooks))
	if err := errors.Join(d.holder.Close(), d.holder.Cleanup()); err != nil {
		v.errs = append(v.errs, err)
	}
	for _, c := range w.cells("kas", "other") {
		if err := reachesKAS(c); err != nil {
			v.errs = append(v.errs, fmt.Errorf("after cleanup: %s: %w", c, err))
		}
	}
	v.errs = append(v.errs, d.holder.End(), leftovers(w, before))
	return summary(all), errors.Join(v.errs...)
}

// course is when things happened.
type course struct {
	holder                             *Holder // the one that lives in the end
	workers                            int
	struck, settled, revived, restored time.Time
	// gone is when a killed process had closed its last socket.
	gone time.Time
}

// strike lets the storm run, strikes, waits, and revives.
func (w *world) strike(t *testing.T, s *storm, h *Holder, f Factory, when rules.WhenDown, signal syscall.Signal) (course, error) {
	d := course{holder: h, workers: s.workers}
	if err := s.proceed(time.Time{}, 20); err != nil {
		return d, err
	}
	d.struck = time.Now()
	d.settled = d.struck.Add(settle)
	if err := h.Signal(signal); err != nil {
		return d, err
	}
	if signal == syscall.SIGKILL {
		_ = h.cmd.Wait() // reports the signal
		d.gone = time.Now()
	}
	// A worker may hang in its connection to the frozen agent until its
	// answer is overdue; afterwards each must be seen to meet the final state.
	if err := s.proceed(d.settled, 20); err != nil {
		return d, fmt.Errorf("after %s: %w", signal, err)
	}
	d.revived = time.Now()
	if signal == syscall.SIGSTOP {
		if err := h.Signal(syscall.SIGCONT); err != nil {
			return d, err
		}
		d.restored = d.revived.Add(settle)
	} else {
		d.holder = start(t, w, f)
		if _, err := d.holder.Apply(State(when)); err != nil {
			return d, fmt.Errorf("adopting what the killed one left: %w", err)
		}
		d.restored = time.Now()
	}
	return d, s.proceed(d.restored, 20)
}

func (d course) judge(all []record, when rules.WhenDown) *verdicts {
	v := &verdicts{}
	if d.struck.IsZero() {
		return v // the storm did not even begin
	}
	if d.revived.IsZero() {
		d.revived = time.Now()
	}
	v.bounded(all)
	v.only("before the blow", finishedBefore(all, d.struck), time.Time{}, time.Time{}, toTarget)
	down := refused
	if when == rules.Direct {
		down = toKAS
	} else {
		v.never("escaped to the KAS", all, toKAS)
	}
	v.only("more than 3 s after the blow", finishedBefore(all, d.revived), d.settled, d.revived, down)
	if !d.restored.IsZero() {
		v.only("after the recovery", all, d.restored, time.Time{}, toTarget)
	}
	v.never("mixed up", all, mixedUp)
	v.never("an errno other than ECONNREFUSED", all, failed)
	if d.gone.IsZero() {
		v.atMost(d.workers, all, brokenOff, d.struck)
	} else {
		// A dying process closes its sockets one by one: what it holds is lost,
		// and what its listener took in that time. It is nothing once it is gone.
		v.never("broken, and begun after the death", begunAfter(all, d.gone), brokenOff)
	}
	return v
}

func begunAfter(all []record, when time.Time) (some []record) {
	for _, r := range all {
		if r.begun.After(when) {
			some = append(some, r)
		}
	}
	return some
}

func finishedBefore(all []record, when time.Time) (some []record) {
	for _, r := range all {
		if r.finished.Before(when) {
			some = append(some, r)
		}
	}
	return some
}

// snapshot is what the mode could leave behind on the node, and around it in
// places that are this world's own.
func (w *world) snapshot() (netns.Snapshot, error) {
	around, err := w.Around()
	if err != nil {
		return nil, err
	}
	return w.Node.Snapshot(around)
}

// leftovers compares the node with what it was.
func leftovers(w *world, before netns.Snapshot) error {
	after, err := w.snapshot()
	if err != nil {
		return err
	}
	var errs []error
	for _, line := range before.Diff(after) {
		errs = append(errs, fmt.Errorf("left behind: %s", line))
	}
	return errors.Join(errs...)
}

// attached demands exactly one program at each of these hooks of the node's
// cgroup, and none elsewhere.
func (w *world) attached(hooks []string) error {
	dir := w.NodeCgroup()
	if dir == "" {
		return nil
	}
	all, err := netns.AttachedTo(dir)
	if err != nil {
		return err
	}
	var have []string
	for _, a := range all {
		have = append(have, a.Hook)
	}
	if slices.Sort(have); !slices.Equal(have, slices.Sorted(slices.Values(hooks))) {
		return fmt.Errorf("programs are attached at %v, want one at each of %v", have, hooks)
	}
	return nil
}
