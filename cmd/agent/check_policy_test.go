package main

import (
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/rules"
)

// For every mode it is said who still enforces a policy on the KAS's address,
// what a policy that allows nothing else does, and what the agent's guard does.
func TestCase_B98_CheckTellsWhoEnforces(t *testing.T) {
	cfg := config.AgentDefaults()
	cfg.Intercept.Clients = rules.Clients{Host: true, Pods: true}
	cfg.Intercept.NodeIPv4, cfg.Intercept.NodeIPv6 = "169.254.77.5", "fd77::5"
	all := []string{config.ModeEBPF, config.ModeNFT, config.ModeIPTables, config.ModeTPROXY}
	rows := func(usable ...string) map[string]string {
		out := map[string]string{}
		for _, f := range checkPolicies(cfg, usable) {
			if f.State != stateNote {
				t.Errorf("%s: state %s fails a check that has nothing to ask for", f.Need, f.State)
			}
			if !strings.HasPrefix(f.Need, "NetworkPolicy, ") {
				out[f.Need] = f.Detail
				continue
			}
			for mode := range strings.SplitSeq(strings.TrimPrefix(f.Need, "NetworkPolicy, "), ", ") {
				out["NetworkPolicy, "+mode] = f.Detail + "\n" + strings.Join(f.Notes, "\n")
			}
		}
		return out
	}
	got := rows(all...)
	for _, mode := range all {
		if got["NetworkPolicy, "+mode] == "" {
			t.Fatalf("no row for mode %s: %q", mode, got)
		}
	}
	if row := got["guard.rules"]; !strings.Contains(row, "no rule about pods; the agent itself enforces") {
		t.Errorf("the guard: %s", row)
	}
	for mode, texts := range map[string][]string{
		config.ModeEBPF:     {"nobody enforces a policy by the KAS's address", "seen by everybody", "denies the KAS denies nothing", "times out", "allow egress to 169.254.77.5 and fd77::5"},
		config.ModeNFT:      {"still enforced by programs at the pod's interface", "filter tables (forward, input)", "times out", "allow egress to 169.254.77.5"},
		config.ModeIPTables: {"still enforced by programs at the pod's interface", "filter tables (forward, input)", "times out"},
		config.ModeTPROXY:   {"without another address", "forward hook", "by the KAS's address"},
	} {
		for _, text := range texts {
			if row := got["NetworkPolicy, "+mode]; !strings.Contains(row, text) {
				t.Errorf("mode %s: %q is not said in:\n%s", mode, text, row)
			}
		}
	}
	cfg.Guard.Rules = []config.GuardRule{{Prefixes: []string{"10.0.0.0/8"}}, {UIDs: []uint32{7}}}
	if row := rows(config.ModeEBPF)["guard.rules"]; !strings.Contains(row, "1 rule about pods") {
		t.Errorf("a guard with one rule about pods: %s", row)
	}
	cfg.Intercept.NodeIPv6 = ""
	if row := rows(config.ModeNFT)["NetworkPolicy, nft"]; !strings.Contains(row, "169.254.77.5 and node6 of status") {
		t.Errorf("an address that is not made yet: %s", row)
	}
	cfg.Intercept.Clients.Pods = false
	if got := rows(all...); len(got) != 0 {
		t.Errorf("pods are not diverted: %q", got)
	}
	cfg.Intercept.Mode, cfg.Intercept.BindAddress = config.ModeListen, "169.254.77.2"
	if row := rows(config.ModeListen)["NetworkPolicy, listen"]; !strings.Contains(row, "connect to 169.254.77.2 themselves") {
		t.Errorf("mode listen: %s", row)
	}
}
