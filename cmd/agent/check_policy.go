package main

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
)

// A NetworkPolicy names the address that a pod means, and a diverted connection
// has another one. sight is who among those that enforce policies sees the
// node's address, and who sees the KAS's.
type sight struct{ node, kas string }

// Where plugins enforce, in the words of the page docs/interception.md.
const (
	atInterface = "programs at the pod's interface, and netfilter's raw and mangle tables"
	atFilter    = "netfilter's filter tables (forward, input), where most plugins enforce"
)

// sights are those of each mode that diverts pods.
var sights = map[string]sight{
	config.ModeEBPF:     {node: "everybody, since the address is another one before the first packet is made"},
	config.ModeNFT:      {node: atFilter, kas: atInterface},
	config.ModeIPTables: {node: atFilter, kas: atInterface},
}

// checkPolicies tells who enforces what about pods that connect to the KAS, for
// each mode that can be used.
func checkPolicies(cfg config.Agent, usable []string) (found []finding) {
	addresses, err := agent.NodeAddresses(cfg.Intercept)
	if err != nil {
		return nil // a row about these addresses tells
	}
	var at []netip.Addr
	for _, a := range addresses {
		at = append(at, a.Addr)
	}
	for _, mode := range usable {
		f := finding{Need: "NetworkPolicy, " + mode, State: stateNote}
		switch {
		case mode == config.ModeListen:
			f.Detail = fmt.Sprintf("pods connect to %s themselves, and that is what policies see: allow it", places(at))
		case !cfg.Intercept.Clients.Pods:
			continue
		case mode == config.ModeTPROXY, mode == tproxyIPTables:
			f.Detail = "pods are diverted without another address"
			f.Notes = []string{"what they send is taken in by the node and not forwarded: a policy enforced where packets are forwarded (netfilter's forward hook) " +
				"does not see it; one at the pod's interface or where packets come in (input) does, by the KAS's address"}
		default:
			own := places(at)
			if len(at) == 1 && at[0].Is4() {
				own += " and node6 of status -o json" // made at the first start
			}
			f.Detail = "pods that connect to the KAS are diverted to their own node, at " + own
			f.Notes = sights[mode].say(own)
		}
		if n := len(found); n > 0 && found[n-1].Detail == f.Detail && slices.Equal(found[n-1].Notes, f.Notes) {
			found[n-1].Need += ", " + mode
			continue
		}
		found = append(found, f)
	}
	if len(found) > 0 {
		found = append(found, finding{Need: "guard.rules", State: stateNote, Detail: guarded(cfg.Guard)})
	}
	return found
}

// say tells what becomes of policies; at is the address to be allowed.
func (s sight) say(at string) []string {
	kas := "nobody enforces a policy by the KAS's address"
	if s.kas != "" {
		kas = "a policy by the KAS's address is still enforced by " + s.kas
	}
	return []string{
		kas,
		"the node's address is seen by " + s.node + ": a policy that denies the KAS denies nothing there",
		"one that allows nothing but the KAS drops what is diverted there, and connect times out: allow egress to " + at,
	}
}

// guarded says what the agent enforces by itself about pods.
func guarded(g config.Guard) string {
	n := 0
	for _, r := range g.Rules {
		if len(r.Prefixes) > 0 {
			n++
		}
	}
	if n == 0 {
		return "no rule about pods; the agent itself enforces these rules, whatever policies see"
	}
	return count(n, "rule") + " about pods; the agent itself enforces these rules, whatever policies see"
}

func places(at []netip.Addr) string {
	var texts []string
	for _, a := range at {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, " and ")
}
