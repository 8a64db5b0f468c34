package iptables

import (
	"net/netip"
	"testing"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// On a node that is itself a host of the KAS, other hosts reach it as ever,
// whether or not the agent lives; pods of the node are diverted or refused.
func TestKASOnThisNode(t *testing.T) {
	l := newLab(t)
	here4, here6 := netip.AddrPortFrom(l.Node.Addr4, 6443), netip.AddrPortFrom(l.Node.Addr6, 6443)
	l.serve(l.Node, here4, "KAS here")
	l.serve(l.Node, here6, "KAS here")
	s := intercepttest.State(rules.Refuse)
	s.Diverts = s.Diverts[:1]
	for _, a := range []netip.AddrPort{here4, here6} {
		s.Diverts[0].Entries = append(s.Diverts[0].Entries, rules.Entry{Prefix: netip.PrefixFrom(a.Addr(), a.Addr().BitLen()), Port: a.Port()})
	}
	h := l.agent()
	if _, err := h.Apply(s); err != nil {
		t.Fatal(err)
	}
	neighbour := func(when string) {
		t.Helper()
		for _, a := range []netip.AddrPort{here4, here6} {
			if got := l.sees(l.Neighbour, a); got != "KAS here" {
				t.Errorf("%s: the neighbour at %s meets %s, want the KAS here", when, a, got)
			}
		}
	}
	neighbour("alive")
	l.all("alive", "kas", here4, here6)
	if err := h.Close(); err != nil {
		t.Fatal(err)
	}
	neighbour("closed")
	l.all("closed", "refused", here4, here6)
}

// What kube-proxy would translate is refused by a reset that its client
// understands, whatever kind of kube-proxy there is: also by pods on a bridge.
func TestGuard_BeforeKubeProxy(t *testing.T) {
	for _, proxy := range netns.KubeProxies {
		t.Run(string(proxy), func(t *testing.T) {
			t.Parallel()
			l := newLab(t)
			l.kubeProxy(proxy)
			h := l.agent()
			l.apply(h, "g1", rules.Refuse)
			if err := h.Close(); err != nil {
				t.Fatal(err)
			}
			l.all("closed", "refused")
		})
	}
}
