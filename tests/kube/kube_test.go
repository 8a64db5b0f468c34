//go:build kube

package kube

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

// binaries are what every bed runs.
var binaries bed.Binaries

func TestMain(m *testing.M) {
	os.Exit(func() int {
		if os.Geteuid() != 0 {
			fmt.Fprintln(os.Stderr, "these tests make network namespaces, control groups and containers: run them as root")
			return 77
		}
		unlock, err := bed.Lock()
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer unlock()
		if binaries, err = bed.Build(context.Background()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		interrupted := make(chan os.Signal, 1)
		signal.Notify(interrupted, os.Interrupt, syscall.SIGTERM)
		go func() {
			<-interrupted
			_ = bed.Down() // what it leaves, the next run removes
			unlock()
			os.Exit(1)
		}()
		return m.Run()
	}())
}

// full is whether every combination is wanted, not only a subset that holds
// each pair of settings.
func full() bool { return os.Getenv("FULL") == "1" }

// beds are the combinations of TestNode. In the subset each pair of the five
// settings occurs; mode iptables comes only with the full set.
func beds() []bed.Config {
	if !full() {
		return []bed.Config{
			{Proxy: "iptables", Form: bed.FormProcess, Mode: "nft"},
			{Proxy: "iptables", Form: bed.FormProcess, Mode: "ebpf", DualStack: true},
			{Proxy: "iptables", Form: bed.FormProcess, Mode: "ebpf", Bootstrap: true},
			{Proxy: "iptables", Form: bed.FormStaticPod, Mode: "ebpf"},
			{Proxy: "nftables", Form: bed.FormProcess, Mode: "ebpf"},
			{Proxy: "nftables", Form: bed.FormStaticPod, Mode: "nft", Bootstrap: true, DualStack: true},
		}
	}
	var all []bed.Config
	for _, proxy := range []string{"iptables", "nftables"} {
		for _, dual := range []bool{false, true} {
			for _, bootstrap := range []bool{false, true} {
				c := bed.Config{Proxy: proxy, Bootstrap: bootstrap, DualStack: dual}
				for _, c.Mode = range []string{"ebpf", "nft"} {
					c.Form = bed.FormStaticPod
					all = append(all, c)
					c.Form = bed.FormProcess
					all = append(all, c)
				}
				// Mode iptables: the image here holds no iptables, and a chain of
				// kube-proxy's nftables mode translates ClusterIPs before any of
				// iptables can, which the mode's preflight says.
				if c.Mode = "iptables"; proxy == "iptables" {
					all = append(all, c)
				}
			}
		}
	}
	return all
}

// daemonSets are the combinations of TestDaemonSet, with two nodes each.
func daemonSets() []bed.Config {
	all := []bed.Config{{Proxy: "nftables", Form: bed.FormDaemonSet, Mode: "ebpf", Nodes: 2}}
	if full() {
		all = append(all,
			bed.Config{Proxy: "iptables", Form: bed.FormDaemonSet, Mode: "ebpf", Bootstrap: true, DualStack: true, Nodes: 2},
			bed.Config{Proxy: "iptables", Form: bed.FormDaemonSet, Mode: "nft", Nodes: 2},
			bed.Config{Proxy: "nftables", Form: bed.FormDaemonSet, Mode: "nft", DualStack: true, Nodes: 2})
	}
	return all
}

// outageBeds are the combinations of TestCase_B93_Outage: every mode once.
func outageBeds() []bed.Config {
	all := []bed.Config{{Proxy: "iptables", Form: bed.FormProcess, Mode: "ebpf"}}
	if full() {
		all = append(all,
			bed.Config{Proxy: "nftables", Form: bed.FormProcess, Mode: "nft"},
			bed.Config{Proxy: "iptables", Form: bed.FormProcess, Mode: "iptables"})
	}
	return all
}

// up brings up a bed as far as the control plane, and takes it down with the
// test. What the components said is shown if the test fails.
func up(t *testing.T, c bed.Config) *bed.Bed {
	t.Helper()
	b := bed.New(c, binaries)
	t.Cleanup(func() {
		if t.Failed() {
			logs := []string{bed.Server, "kube-apiserver"}
			for _, n := range b.Nodes {
				for _, p := range []string{bed.Agent, "boot", "start", "containerd", "kubelet", "kube-proxy"} {
					logs = append(logs, n.Process(p))
				}
			}
			for _, l := range logs {
				t.Logf("the end of %s.log:\n%s", l, b.Tail(l, 15))
			}
			if os.Getenv("KEEP") != "" {
				t.Fatalf("left up in %s; remove it with: go run ./tests/kube/kubebed down", bed.Dir())
			}
		}
		if err := bed.Down(); err != nil {
			t.Error(err)
		}
		if left := bed.Left(binaries); len(left) > 0 {
			t.Errorf("left behind: %q", left)
		}
	})
	must(t, "bringing the bed up", b.Up(t.Context()))
	return b
}

func must(t *testing.T, what string, err error) {
	t.Helper()
	if err != nil {
		t.Fatalf("%s: %v", what, err)
	}
}

// startNode starts the agents and the nodes, gives them their work, and waits
// for none of it but for the agents' answer on their operator ports: 200 or 503.
// It returns what the firewall has dropped until then. That is nothing if the
// agent is a process, which comes before the kubelet; a kubelet that starts the
// agent tries the direct way before, and may use it where the agent is a
// DaemonSet's.
func startNode(t *testing.T, b *bed.Bed, ready int) bed.Drops {
	t.Helper()
	must(t, "starting the agent", b.StartAgent(t.Context()))
	if b.Form == bed.FormProcess {
		must(t, "the agent before the kubelet", b.AgentAnswers(t.Context(), "/readyz", ready))
	}
	must(t, "starting the node", b.StartNode(t.Context()))
	must(t, "starting the workload", b.StartWorkload(t.Context()))
	if b.Form == bed.FormProcess {
		return bed.Drops{}
	}
	must(t, "the agent that the kubelet starts", b.AgentAnswers(t.Context(), "/readyz", ready))
	if b.Form == bed.FormDaemonSet {
		must(t, "closing the way past Kasway", b.CloseDirect(t.Context()))
	}
	d, err := bed.Dropped(t.Context())
	must(t, "reading what the firewall dropped", err)
	return d
}

// TestNode: a node that can reach one port of its control plane works.
func TestNode(t *testing.T) {
	for _, c := range beds() {
		t.Run(c.Name(), func(t *testing.T) {
			b := up(t, c)
			must(t, "starting the server", b.StartServer(t.Context()))
			before := startNode(t, b, 200)
			everyCheckPasses(t, b)
			nothingWentAnotherWay(t, before)
		})
	}
}

// TestWithoutServer: the checks can fail. In one bed whose server is missing
// every one of them does, and starting the server is all it takes.
func TestWithoutServer(t *testing.T) {
	c := bed.Config{Proxy: "nftables", Form: bed.FormProcess, Mode: "nft", Bootstrap: true, DualStack: true}
	b := up(t, c)
	before := startNode(t, b, 503)
	// Longer than the node of any bed takes to become ready; after it one try
	// of each tells.
	limit := 12 * time.Second
	for _, check := range checks(c) {
		t.Run("missing/"+check.name, func(t *testing.T) {
			err := check.run(t.Context(), b, limit)
			limit = 0
			if err == nil {
				t.Error("it passes, and there is no server")
			} else {
				t.Logf("as it should: %v", err)
			}
		})
	}
	nothingWentAnotherWay(t, before)
	must(t, "starting the server", b.StartServer(t.Context()))
	everyCheckPasses(t, b)
	nothingWentAnotherWay(t, before)
}

// everyCheckPasses gives all checks together a minute and a half.
func everyCheckPasses(t *testing.T, b *bed.Bed) {
	ctx, cancel := context.WithTimeout(t.Context(), 90*time.Second)
	defer cancel()
	for _, check := range checks(b.Config) {
		t.Run(check.name, func(t *testing.T) {
			started := time.Now()
			if err := check.run(ctx, b, time.Minute); err != nil {
				t.Fatal(err)
			}
			t.Logf("after %.1f s", time.Since(started).Seconds())
		})
	}
}

// nothingWentAnotherWay: whatever reached the KAS came through Kasway, and
// nobody so much as tried the direct way since the agent was there.
func nothingWentAnotherWay(t *testing.T, before bed.Drops) {
	t.Run("firewall dropped nothing", func(t *testing.T) {
		d, err := bed.Dropped(t.Context())
		must(t, "reading what the firewall dropped", err)
		// A connection from before goes on trying; others must not be there.
		d.Connections = slices.DeleteFunc(d.Connections, func(c string) bool { return slices.Contains(before.Connections, c) })
		if len(d.Connections) > 0 || before.Packets == 0 && d.Packets > 0 {
			t.Errorf("it dropped %d packets, of these connections: %q", d.Packets, d.Connections)
		}
	})
}
