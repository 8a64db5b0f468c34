package iptables

import (
	"context"
	"reflect"
	"slices"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// On a node with very many rules single chains are asked for, and the answer is
// the same: nobody is suspected when the node grows.
func TestLook_BothWays(t *testing.T) {
	l := newLab(t)
	l.kubeProxy(netns.IptablesNFT)
	s := l.apply(l.agent(), "g1", rules.Refuse)
	for _, f := range rules.RenderIPTables(s).Families {
		var all, single standing
		err := l.Node.Do(func() error {
			one, err := findTool(nft, f.V6, run)
			if err != nil {
				return err
			}
			if all, err = one.look(context.Background(), f); err != nil {
				return err
			}
			one.many = true
			single, err = one.look(context.Background(), f)
			return err
		})
		if err != nil {
			t.Fatal(err)
		}
		for at, list := range single {
			same := slices.EqualFunc(list, all[at], func(a, b rules.IPRule) bool { return reflect.DeepEqual(a, b) })
			if !same || len(list) == 0 {
				t.Errorf("%v: %v one by one, %v at once", at, list, all[at])
			}
		}
		if len(single) < 8 {
			t.Errorf("only %d chains looked at", len(single))
		}
	}
}
