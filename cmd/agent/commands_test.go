package main

import (
	"bytes"
	"context"
	"encoding/json"
	"net/netip"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

const dryRunHeader = "# Dry run: generation \"dryrun\", the ports from 40001 on and the node's IPv6 address stand for those of the running agent.\n"

// exampleState is what the example diverts where its name does not resolve.
func exampleState() rules.State {
	entry := func(prefix string, port uint16) rules.Entry {
		return rules.Entry{Prefix: netip.MustParsePrefix(prefix), Port: port}
	}
	return rules.State{
		Generation: "dryrun", Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Refuse, Mark: 0x40, MarkMask: 0x40,
		Node4: netip.MustParseAddr("169.254.77.1"), Node6: netip.MustParseAddr("fd77::1"),
		Diverts: []rules.Divert{{
			Name:    "kas",
			Entries: []rules.Entry{entry("10.96.0.1/32", 443), entry("172.30.0.10/32", 6443), entry("fd00:96::1/128", 443)},
			Ports:   rules.Ports{Host4: 40001, Host6: 40002, Pod4: 40003, Pod6: 40004},
		}},
	}
}

// Without a network no name resolves: what is known is printed as the mode
// installs it, and one line says what is not known. How a State is written down
// is proven where that is done.
func TestRules(t *testing.T) {
	netns.Require(t) // where no network is
	unresolved := regexp.MustCompile(`^kasway-agent: warning: cannot resolve kas\.example\.svc; it has no address yet: [^\n]+\n$`)
	s := exampleState()
	direct := exampleState()
	direct.WhenDown, direct.Clients, direct.Diverts[0].Ports = rules.Direct, rules.Clients{Host: true}, rules.Ports{Host4: 40001, Host6: 40002}
	for want, args := range map[string][]string{
		dryRunHeader + rules.RenderNFT(s):               {"--mode", "nft"},
		dryRunHeader + rules.RenderIPTables(s).String(): {"--mode", "iptables"},
		"# intercept.mode is auto; this is ebpf, the first that is tried (--mode shows another).\n" +
			dryRunHeader + rules.RenderBPFText(direct): {"--when-down", "direct", "--clients", "host"},
	} {
		code, out, errs := command(t, append([]string{"rules", "-f", example}, args...)...)
		if code != cli.OK || !unresolved.MatchString(errs) {
			t.Errorf("%v: exit %d: %s", args, code, errs)
		}
		if diff := cmp.Diff(want, out); diff != "" {
			t.Errorf("%v (-want +got):\n%s", args, diff)
		}
	}
}

// In mode listen nobody is diverted, and no name is looked up.
func TestRulesListen(t *testing.T) {
	netns.Require(t)
	guarded := []netip.AddrPort{netip.MustParseAddrPort("169.254.77.2:5000"), netip.MustParseAddrPort("169.254.77.2:6443")}
	want := "# Dry run: nothing was changed.\n# listens on 169.254.77.2:6443 for kas\n# listens on 169.254.77.2:5000 for registry\n" +
		rules.PlanNFTListen(guarded, 0x40, 0x40).String()
	if diff := cmp.Diff(want, ok(t, "rules", "-f", "testdata/listen.yaml")); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// agentFlags are those of an agent without any server.
func agentFlags(dir string) []string {
	return append(identity(dir), "--target", "kas=10.96.0.1:443", "--clients", "host", "--server", "127.0.0.1:1", "--mode", "nft",
		"--state-dir", filepath.Join(dir, "state"), "--admin-socket", filepath.Join(dir, "agent.sock"), "--log-format", "json")
}

// The commands beside a running agent, and after it.
func TestCommandsBesideAnAgent(t *testing.T) {
	netns.Require(t)
	dir := pki(t)
	socket, state := []string{"--admin-socket", filepath.Join(dir, "agent.sock")}, []string{"--state-dir", filepath.Join(dir, "state")}
	before := ruleset(t)
	ctx, stop := context.WithCancel(t.Context())
	var (
		wg   sync.WaitGroup
		code int
		errs bytes.Buffer
	)
	wg.Go(func() {
		code = cli.Run(ctx, root(), append([]string{"run"}, agentFlags(dir)...), &bytes.Buffer{}, &errs)
	})
	end := sync.OnceFunc(func() { stop(); wg.Wait() })
	defer end()
	var s agent.Status
	eventually(t, "an agent that diverts", func() bool {
		c, out, _ := command(t, append([]string{"status", "-o", "json"}, socket...)...)
		return c == cli.OK && json.Unmarshal([]byte(out), &s) == nil && s.Mode == "nft"
	})

	table := ok(t, append([]string{"status"}, socket...)...)
	for _, says := range []string{"not ready: no way to kas: no link to a server is up", "nft, when down: refuse", "10.96.0.1:443", "held", "127.0.0.1:1"} {
		if !strings.Contains(table, says) {
			t.Errorf("status does not say %q:\n%s", says, table)
		}
	}
	c, _, serr := command(t, append([]string{"status", "--ready"}, socket...)...)
	if c != cli.Failed || serr != "kasway-agent: not ready: no way to kas: no link to a server is up\n" {
		t.Errorf("status --ready: exit %d: %s", c, serr)
	}
	if out := ok(t, append([]string{"rules", "--running"}, socket...)...); !strings.Contains(out, "table inet kasway_"+s.Generation) {
		t.Errorf("rules --running shows another generation than %s:\n%s", s.Generation, out)
	}
	c, out, serr := command(t, append(append([]string{"cleanup"}, socket...), state...)...)
	if c != cli.Failed || out != "" || !strings.Contains(serr, "stop it first") || !strings.Contains(ruleset(t), "kasway_"+s.Generation) {
		t.Errorf("cleanup beside a running agent: exit %d: %s", c, serr)
	}

	end()
	if code != cli.OK || !strings.Contains(errs.String(), "kasway-agent has stopped") {
		t.Errorf("run: exit %d: %s", code, errs.String())
	}
	if got := ruleset(t); !strings.Contains(got, "kasway_guard") || strings.Contains(got, "kasway_"+s.Generation) {
		t.Errorf("only the guard is to be left:\n%s", got)
	}
	for range 2 {
		if out := ok(t, append(append([]string{"cleanup"}, socket...), state...)...); out != "nothing of Kasway is left on this node\n" {
			t.Error(out)
		}
	}
	if got := ruleset(t); got != before {
		t.Errorf("left behind:\n%s", got)
	}
}

func ruleset(t *testing.T) string {
	t.Helper()
	out, err := exec.Command("nft", "list", "ruleset").CombinedOutput()
	if err != nil {
		t.Fatalf("nft: %v: %s", err, out)
	}
	return string(out)
}

func TestWithoutAnAgent(t *testing.T) {
	socket := filepath.Join(t.TempDir(), "agent.sock")
	for _, args := range [][]string{{"status"}, {"status", "--ready"}, {"conns"}, {"rules", "--running"}} {
		code, out, errs := command(t, append(args, "--admin-socket", socket)...)
		if code != cli.Failed || out != "" || errs != "kasway-agent: no agent answers on "+socket+": is it running? (--admin-socket)\n" {
			t.Errorf("%v: exit %d: %s%s", args, code, out, errs)
		}
	}
}

func TestStatusTable(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	printStatus(w, agent.Status{
		Version: "v1", Started: now.Add(-90 * time.Minute), Ready: true, Mode: "iptables", WhenDown: "direct",
		Skipped: []agent.SkippedStatus{{Mode: "nft", Reason: "not supported\nno table", Remedy: "load nf_tables"}},
		Targets: []agent.TargetStatus{{Name: "kas", State: "open", Addresses: []string{"10.96.0.1:443", "[fd00::1]:443"}, Connections: agent.ConnCounts{Open: 12, Held: 1}}, {Name: "named", State: "held"}},
		Links: []agent.LinkStatus{
			{Server: "192.0.2.1:8091", State: "up", Since: now.Add(-time.Minute), RTT: 1234567, Version: "v2", Streams: 3},
			{Server: "kasway.example:8091", State: "waiting", LastError: "no route"},
		},
	}, []agent.Status{
		{Version: "v0", Generation: "0a1b2c3d", Started: now.Add(-26 * time.Hour), Phase: agent.PhaseDraining,
			Drain: &agent.DrainStatus{By: "4e5f", Connections: 12, Reset: 3, Ended: 1, Ends: now.Add(time.Minute)}},
		{Version: "v2", Generation: "99999999", Started: now.Add(-time.Second), Phase: agent.PhaseStarting},
	}, now)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	golden(t, "status", b.String())
}

// What is not tried must not act beside what is.
func TestCandidates(t *testing.T) {
	names := func(cs []intercept.Candidate) (out []string) {
		for _, c := range cs {
			out = append(out, c.Name)
		}
		slices.Sort(out)
		return out
	}
	all := modes(config.Intercept{}, nil, ebpfParts{})
	for mode, want := range map[string][2][]string{
		config.ModeAuto:   {{"ebpf", "iptables", "nft"}, {"tproxy"}},
		config.ModeEBPF:   {{"ebpf"}, {"iptables", "listen", "nft", "tproxy", "tproxy-iptables"}},
		"nft":             {{"nft"}, {"ebpf", "iptables", "listen", "tproxy", "tproxy-iptables"}},
		"iptables":        {{"iptables"}, {"ebpf", "listen", "nft", "tproxy", "tproxy-iptables"}},
		config.ModeTPROXY: {{"tproxy", "tproxy-iptables"}, {"ebpf"}},
		config.ModeListen: {{"listen"}, {"ebpf", "iptables", "tproxy", "tproxy-iptables"}},
	} {
		try, others := candidates(mode, all)
		if !slices.Equal(names(try), want[0]) || !slices.Equal(names(others), want[1]) {
			t.Errorf("%s: tries %v, sweeps %v, want %v", mode, names(try), names(others), want)
		}
	}
	if try, _ := candidates(config.ModeAuto, all); try[0].Name != config.ModeEBPF {
		t.Errorf("auto tries %s first", try[0].Name)
	}
	if got := names(everyMode()); !slices.Equal(got, []string{"ebpf", "iptables", "nft", "tproxy"}) {
		t.Errorf("cleanup cleans %v", got)
	}
	for _, c := range everyMode() {
		if c.Cleanup == nil {
			t.Errorf("mode %s has nothing to clean up with", c.Name)
		}
	}
}

func TestGeneration(t *testing.T) {
	a, b := generation(), generation()
	if a == b || !regexp.MustCompile(`^[a-z0-9]{1,15}$`).MatchString(a) {
		t.Errorf("%s, %s", a, b)
	}
}

func TestClientRules(t *testing.T) {
	list, needWho, err := clientRules(config.Guard{Rules: []config.GuardRule{
		{Allow: true, Prefixes: []string{"10.0.0.0/8"}, Targets: []string{"kas"}}, {Prefixes: []string{"0.0.0.0/0"}},
	}})
	if err != nil || needWho || len(list) != 2 || !list[0].Allow || list[1].Allow || list[0].Prefixes[0].String() != "10.0.0.0/8" || list[0].Targets[0] != "kas" {
		t.Errorf("%+v, %v, %v", list, needWho, err)
	}
	if _, needWho, err := clientRules(config.Guard{Rules: []config.GuardRule{{UIDs: []uint32{7}}}}); !needWho || err != nil {
		t.Errorf("a rule about uids: asks %v, %v", needWho, err)
	}
	if _, _, err := clientRules(config.Guard{Rules: []config.GuardRule{{Prefixes: []string{"x"}}}}); err == nil {
		t.Error("a prefix that is none")
	}
}
