package iptables

import (
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
)

func TestChoose(t *testing.T) {
	none, some, kube := holding{}, holding{rules: true}, holding{rules: true, kube: true}
	for _, c := range []struct {
		inNFT, inLegacy holding
		want            backEnd
	}{
		{none, none, nft},
		{some, none, nft},
		{none, some, legacy},
		{some, some, nft},
		{kube, some, nft},
		{some, kube, legacy},
		{none, kube, legacy},
		{kube, kube, nft},
	} {
		if got, why := choose(c.inNFT, c.inLegacy); got != c.want || why == "" {
			t.Errorf("nft holds %+v, legacy %+v: chose %s (%q), want %s", c.inNFT, c.inLegacy, got, why, c.want)
		}
	}
}

func TestHolds(t *testing.T) {
	for save, want := range map[string]holding{
		"": {},
		"*nat\n:PREROUTING ACCEPT [0:0]\n:MINE - [0:0]\nCOMMIT\n":                                     {},
		"*nat\n-A PREROUTING -j MINE\n":                                                               {rules: true},
		"*nat\n:KUBE-SERVICES - [0:0]\n":                                                              {kube: true},
		"*nat\n-A PREROUTING -j KUBE-SERVICES\n:KUBE-SERVICES - [0:0]\n":                              {rules: true, kube: true},
		"*nat\n-A PREROUTING -p tcp -j KASWAY-PRE-a\n-A KASWAY-PRE-a -d 10.0.0.1/32 -j DNAT --to x\n": {},
	} {
		if got := holds([]byte(save)); got != want {
			t.Errorf("%q holds %+v, want %+v", save, got, want)
		}
	}
}

// The chains of Kubernetes are in the nft tables; the legacy tables exist and
// can be listed, but hold nothing. A back end chosen by "can be listed" would
// put the rules where nobody looks.
func TestCase_B40_LegacyListableButEmpty(t *testing.T) {
	l := newLab(t)
	l.kubeProxy("iptables-nft")
	for _, name := range []string{"iptables-legacy", "ip6tables-legacy"} {
		l.node(name + " -t nat -S")
		l.node(name + " -t filter -S")
	}
	h := l.agent()
	if r := h.Preflight(); r.Err != nil {
		t.Fatal(r.Err)
	}
	l.apply(h, "g1", rules.Refuse)
	for name, want := range map[string]bool{"iptables-nft-save": true, "ip6tables-nft-save": true, "iptables-legacy-save": false, "ip6tables-legacy-save": false} {
		if got := strings.Contains(l.node(name), "KASWAY-PRE-g1"); got != want {
			t.Errorf("%s shows our chain: %t, want %t", name, got, want)
		}
	}
	l.all("with the mode on", "kas")
}

// kube-proxy in its nftables mode has a table of its own. Ours leave it alone,
// and the commands of iptables still read theirs.
func TestCase_B42_KubeProxyNftables(t *testing.T) {
	l := newLab(t)
	l.kubeProxy("nftables")
	theirs := func() string { return l.node("nft list table ip kube-proxy") + l.node("nft list table ip6 kube-proxy") }
	before := theirs()
	h := l.agent()
	l.apply(h, "g1", rules.Refuse)
	l.all("with the mode on", "kas")
	for _, name := range []string{"iptables", "ip6tables"} {
		if out := l.node(name + " -t nat -S"); !strings.Contains(out, "-j KASWAY-PRE-g1") {
			t.Errorf("%s -t nat -S does not show our jump:\n%s", name, out)
		}
	}
	if after := theirs(); after != before {
		t.Errorf("kube-proxy's tables were\n%s\nand are\n%s", before, after)
	}
	if r := h.Preflight(); len(r.Notes) == 0 || !strings.Contains(strings.Join(r.Notes, "\n"), "table kube-proxy") {
		t.Errorf("preflight notes nothing of kube-proxy's nat chains: %q", r.Notes)
	}
}
