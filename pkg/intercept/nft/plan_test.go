package nft

import (
	"context"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// What mode tproxy has installed by this package is what its text says, and
// what stays after Close is what that plan says.
func TestAnotherPlan(t *testing.T) {
	for name, change := range map[string]func(*rules.State){
		"plain":   func(*rules.State) {},
		"refused": func(s *rules.State) { s.Diverts[0].Refused = true },
		"direct":  func(s *rules.State) { s.WhenDown = rules.Direct },
		"v4":      func(s *rules.State) { s.Node6 = netip.Addr{} },
	} {
		t.Run(name, func(t *testing.T) {
			netns.Require(t)
			lab, err := netns.Open()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = lab.Close() }()
			s := (&world{t: t, ports: rules.Ports{Host4: 1, Host6: 2, Pod4: 3, Pod6: 4}}).state(change)
			hosts := map[string]*netns.Host{}
			for _, label := range []string{"printed", "installed"} {
				if hosts[label], err = lab.Host(label); err != nil {
					t.Fatal(err)
				}
			}
			same := func(when string, plan []rules.NFTTable) {
				t.Helper()
				text := "flush ruleset\n"
				for _, table := range plan {
					text += table.String()
				}
				if _, err := hosts["printed"].RunInput(text, "nft", "-f", "-"); err != nil {
					t.Fatal(err)
				}
				if diff := cmp.Diff(ruleset(t, hosts["printed"]), ruleset(t, hosts["installed"])); diff != "" {
					t.Errorf("%s: (-printed +installed)\n%s", when, diff)
				}
			}
			m := New(Config{Plan: rules.PlanTProxyNFT, Linger: rules.PlanTProxyNFTLinger})
			do := func(f func() error) {
				t.Helper()
				if err := hosts["installed"].Do(f); err != nil {
					t.Fatal(err)
				}
			}
			apply := func() error { return m.Apply(context.Background(), s) }
			whole := rules.PlanTProxyNFT(s)
			for _, when := range []string{"made", "replaced"} {
				do(apply)
				same(when, whole)
			}
			if text := whole[0].String(); !strings.Contains(text, "tproxy ip to 127.0.0.1:1 ") && !s.Diverts[0].Refused {
				t.Errorf("nothing is taken:\n%s", text)
			}
			do(m.Close)
			same("closed", append([]rules.NFTTable{rules.PlanTProxyNFTLinger(s)}, whole[1:]...))
			do(apply)
			same("diverting again", whole)
			do(m.Close)
			do(func() error { return Cleanup(context.Background()) })
			same("cleaned up", nil)
		})
	}
}
