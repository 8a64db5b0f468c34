package agent

import (
	"context"
	"errors"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

var (
	flush  = intercept.Damage{What: "the jump is gone", Suspects: "`iptables -F`"}
	kicked = intercept.Damage{What: "the chain is changed", Suspects: "`iptables -F`"}
)

// applied waits for the n-th Apply.
func (r *rig) applied(n int) {
	r.t.Helper()
	eventually(r.t, "applied", func() bool { return len(r.mode.Applied()) == n })
}

// looked waits until the mode has been verified once more from the beginning.
func (r *rig) looked() {
	r.t.Helper()
	before := r.mode.Verified()
	eventually(r.t, "verified", func() bool { return r.mode.Verified() >= before+2 })
}

// entry is the one line of the log that holds message.
func (r *rig) entry(message string) *logrus.Entry {
	r.t.Helper()
	for _, e := range r.hook.AllEntries() {
		if strings.Contains(e.Message, message) {
			return e
		}
	}
	r.t.Fatalf("not logged: %s", message)
	return nil
}

const (
	damageLogged = "somebody has changed what is installed"
	unheldLogged = "does not hold"
)

func TestDamageIsRepaired(t *testing.T) {
	r := newRig(t)
	r.cfg.lookEvery = 100 * time.Millisecond
	r.links.set("kas", "other")
	r.diverting()
	r.looked()
	if n := len(r.mode.Applied()); n != 1 || r.metric("kasway_agent_repairs_total") != 0 {
		t.Errorf("nothing is damaged, and applied %d times", n)
	}
	r.mode.Damage(flush, kicked)
	r.applied(2)
	eventually(t, "counted", func() bool { return r.metric("kasway_agent_repairs_total") == 1 })
	e := r.entry(damageLogged)
	if e.Level != logrus.WarnLevel || e.Data["damage"] != "the jump is gone; the chain is changed" || e.Data["suspects"] != "`iptables -F`" {
		t.Errorf("logged as %v: %v", e.Level, e.Data)
	}
	all := r.mode.Applied()
	if !sameState(all[0], all[1]) {
		t.Error("something else was applied than before")
	}
	// The same again is repaired, and not told of again.
	r.mode.Damage(flush)
	r.applied(3)
	if n := r.logged(logrus.WarnLevel, damageLogged); n != 1 || r.ready() != "ok" {
		t.Errorf("told of %d times; %s", n, r.ready())
	}
	// Somebody who does it again and again is.
	r.mode.Damage(flush)
	r.applied(4)
	eventually(t, "not ready", func() bool {
		return strings.Contains(r.ready(), "what is put back does not hold: the jump is gone (3 times since ")
	})
	if n := r.logged(logrus.ErrorLevel, unheldLogged); n != 1 {
		t.Errorf("that it does not hold is told of %d times", n)
	}
	if got := r.metric("kasway_agent_repairs_total"); got != 3 {
		t.Errorf("%v repairs counted", got)
	}
}

func TestRepairFails(t *testing.T) {
	r := newRig(t)
	r.cfg.lookEvery = 100 * time.Millisecond
	r.links.set("kas", "other")
	r.diverting()
	r.mode.FailApply(errors.New("no space"))
	r.mode.Damage(flush)
	eventually(t, "not ready", func() bool { return strings.Contains(r.ready(), "no space") })
	r.mode.FailApply(nil)
	r.applied(2)
	eventually(t, "ready", func() bool { return r.ready() == "ok" })
}

func TestCannotVerify(t *testing.T) {
	r := newRig(t)
	r.cfg.lookEvery = 100 * time.Millisecond
	r.links.set("kas", "other")
	r.mode.FailVerify(errors.New("out of buffers"))
	r.diverting()
	r.looked()
	r.looked()
	if n := r.logged(logrus.ErrorLevel, "cannot be looked after"); n != 1 || r.metric("kasway_agent_verify_failures_total") < 2 {
		t.Errorf("told of %d times", n)
	}
	if len(r.mode.Applied()) != 1 {
		t.Error("applied again though nothing is known to be damaged")
	}
	r.mode.FailVerify(nil)
	eventually(t, "told that it works", func() bool { return r.logged(logrus.InfoLevel, "looked after again") == 1 })
}

// What does not hold is said seldom, and forgotten once it holds.
func TestWounds(t *testing.T) {
	w, now := wounds{}, time.Now()
	said := 0
	for range 450 { // 15 minutes of a fight
		fresh, relapsed := w.note([]intercept.Damage{flush}, now)
		said += len(fresh) + len(relapsed)
		now = now.Add(2 * time.Second)
	}
	if said != 4 { // at once, on the third time, and twice later
		t.Errorf("said %d times", said)
	}
	if err := w.open(now); err == nil || !strings.Contains(err.Error(), flush.What) {
		t.Errorf("open: %v", err)
	}
	if err := w.open(now.Add(healed)); err != nil {
		t.Errorf("still open: %v", err)
	}
	// Once in a while is no relapse, and after a while it is news again.
	for range 5 {
		now = now.Add(relapse + time.Second)
		if fresh, relapsed := w.note([]intercept.Damage{flush}, now); fresh != nil || relapsed != nil || w.open(now) != nil {
			t.Errorf("%v %v %v", fresh, relapsed, w.open(now))
		}
	}
	now = now.Add(forgotten + time.Second)
	if fresh, _ := w.note([]intercept.Damage{flush}, now); len(fresh) != 1 {
		t.Error("no news after a long time")
	}
	if w.note(nil, now.Add(forgotten+time.Second)); len(w) != 0 {
		t.Errorf("remembers for ever: %v", w)
	}
}

// The witness believes in two failures in a row, unless this process did not run.
func TestWitness(t *testing.T) {
	errTaken := errors.New("it reached another process")
	for name, c := range map[string]struct {
		results []error
		late    bool
		want    bool
	}{
		"well":                     {[]error{nil, nil}, false, false},
		"once":                     {[]error{errTaken}, false, false},
		"twice":                    {[]error{errTaken, errTaken}, false, true},
		"twice, not in a row":      {[]error{errTaken, nil, errTaken}, false, false},
		"over":                     {[]error{errTaken, errTaken, nil}, false, false},
		"twice, while starved":     {[]error{errTaken, errTaken}, true, false},
		"again and again, starved": {slicesOf(errTaken, beyondDoubt), true, true},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				alarms, asked := 0, make(chan struct{})
				results := c.results
				w := newWitness(func(ctx context.Context) error {
					if len(results) == 0 {
						close(asked)
						<-ctx.Done()
						return ctx.Err()
					}
					r := results[0]
					results = results[1:]
					return r
				}, func(time.Time) bool { return c.late }, func() { alarms++ })
				<-asked
				if err := w.testimony(); (err != nil) != c.want || c.want && !errors.Is(err, errTaken) {
					t.Errorf("testimony: %v, want any: %v", err, c.want)
				}
				if c.want && alarms == 0 {
					t.Errorf("%d alarms", alarms)
				}
				w.forget()
				if w.testimony() != nil {
					t.Error("not forgotten")
				}
				w.stop()
			})
		})
	}
}

func slicesOf(err error, n int) (all []error) {
	for range n {
		all = append(all, err)
	}
	return all
}

// An override shows within 5 s: the next proof, one more, and the repair.
func TestWitnessIsInTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		begun, told := time.Now(), make(chan time.Duration, 1)
		w := newWitness(func(context.Context) error { return errors.New("refused") }, func(time.Time) bool { return false },
			func() {
				select {
				case told <- time.Since(begun):
				default:
				}
			})
		defer w.stop()
		if took := <-told; took > 4*time.Second {
			t.Errorf("told after %s", took)
		}
	})
}

// What the self-test shows is repaired as damage is: by the same state again.
func TestSelfTestIsRepeated(t *testing.T) {
	r := newRig(t)
	r.cfg.lookEvery = 100 * time.Millisecond
	r.links.set("kas", "other")
	stolen := make(chan struct{})
	r.mode.onApply = func(context.Context, rules.State) error {
		select {
		case <-stolen:
			r.mode.takeBack()
		default:
		}
		return nil
	}
	r.diverting()
	r.mode.letGo()
	close(stolen)
	r.applied(2)
	if e := r.entry(damageLogged); !strings.Contains(e.Data["damage"].(string), "self-test connection to ") || e.Data["suspects"] == "" {
		t.Errorf("logged %v", e.Data)
	}
	r.looked()
	r.looked()
	if len(r.mode.Applied()) != 2 || r.ready() != "ok" {
		t.Errorf("applied %d times; %s", len(r.mode.Applied()), r.ready())
	}
}
