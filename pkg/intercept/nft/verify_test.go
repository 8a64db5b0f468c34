package nft

import (
	"context"
	"fmt"
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

func (w *world) verify(m *Mode) []intercept.Damage {
	w.t.Helper()
	var damage []intercept.Damage
	err := w.Node.Do(func() (err error) {
		damage, err = m.Verify(context.Background())
		return err
	})
	if err != nil {
		w.t.Fatal(err)
	}
	return damage
}

// Whatever others do to the guard is told of, and the next Apply puts it right.
// What they do to all tables does not reach the one that diverts.
func TestVerify(t *testing.T) {
	for name, c := range map[string]struct{ meddle, want string }{
		"nothing":            {"list tables", ""},
		"flush ruleset":      {"flush ruleset", "table inet kasway_guard is gone"},
		"delete table":       {"delete table inet kasway_guard", "table inet kasway_guard is gone"},
		"flush table":        {"flush table inet kasway_guard", "chain host of table inet kasway_guard: rules are changed"},
		"flush chain":        {"flush chain inet kasway_guard pods_refuse", "chain pods_refuse of table inet kasway_guard: rules are changed"},
		"insert rule":        {"insert rule inet kasway_guard host accept", "chain host of table inet kasway_guard: rules are changed"},
		"dormant":            {"add table inet kasway_guard { flags dormant; }", "flags of table inet kasway_guard are changed"},
		"policy":             {"add chain inet kasway_guard host { policy drop; }", "chain host of table inet kasway_guard: hook, priority or policy is changed"},
		"foreign chain":      {"add chain inet kasway_guard x { type filter hook input priority 0; policy accept; }", "chain x of table inet kasway_guard is not ours"},
		"rival":              {"table ip tail { chain x { type nat hook output priority -110; }; }", "nat chain x of nftables table tail stands before ours, at priority -110"},
		"no rival":           {"table ip tail { chain x { type nat hook output priority -109; }; chain y { type filter hook output priority -300; }; }", ""},
		"heartbeats dropped": {"table ip x { chain x { type filter hook output priority -400; ip daddr 127.64.0.0/10 drop; }; }", "set alive of table inet kasway_t1 is empty"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, netns.Spec{RoutedPods: 1})
			m := w.apply(w.state(nil))
			if damage := w.verify(m); damage != nil {
				t.Errorf("untouched, and told of as %v", damage)
			}
			if _, err := w.Node.RunInput(c.meddle, "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			var damage []intercept.Damage
			told := func() error {
				if damage = w.verify(m); (c.want == "") == (damage == nil) && strings.Contains(fmt.Sprint(damage), c.want) {
					return nil
				}
				return fmt.Errorf("told of %v, want %q", damage, c.want)
			}
			if err := netns.Poll(bound, told); err != nil { // a set lapses before it is empty
				t.Error(err)
			}
			for _, d := range damage {
				if d.Suspects == "" {
					t.Errorf("nobody is suspected of %q", d.What)
				}
			}
			if name == "heartbeats dropped" {
				return // no Apply can help it
			}
			w.want(w.Node, kas4, "host4")
			w.reapply(m, w.state(nil))
			if damage := w.verify(m); damage != nil {
				t.Errorf("applied again, and told of as %v", damage)
			}
			w.want(w.Node, kas4, "host4")
			w.want(w.RoutedPods[0], kas4, "pods4")
			if err := m.Close(); err != nil {
				t.Fatal(err)
			}
			w.want(w.Node, kas4, "refused")
			w.want(w.RoutedPods[0], kas4, "refused")
			if damage := w.verify(m); damage != nil {
				t.Errorf("closed, and told of as %v", damage)
			}
		})
	}
}

func TestOwnTableIsNobodyElses(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	w.apply(w.state(nil))
	for _, meddle := range []string{"delete table inet kasway_t1", "flush table inet kasway_t1", "insert rule inet kasway_t1 host accept"} {
		if _, err := w.Node.RunInput(meddle, "nft", "-f", "-"); err == nil {
			t.Errorf("somebody else could %s", meddle)
		}
	}
	w.want(w.Node, kas4, "host4")
}

// The guard is the one that the newer of two agents has made: the older one
// leaves it alone, unless it is no guard at all.
func TestVerifyBesideAnother(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	old := w.apply(w.state(nil))
	next := w.apply(w.state(func(s *rules.State) {
		s.Generation = "t2"
		s.Diverts[0].Entries = entries(kas4) // and no other address: the guards differ
	}))
	for _, m := range []*Mode{old, next} {
		if damage := w.verify(m); damage != nil {
			t.Errorf("told of %v", damage)
		}
	}
	if _, err := w.Node.Run("nft", "flush", "table", "inet", rules.NFTGuard); err != nil {
		t.Fatal(err)
	}
	for _, m := range []*Mode{old, next} {
		if damage := w.verify(m); damage == nil {
			t.Error("a flushed guard is not told of")
		}
	}
}
