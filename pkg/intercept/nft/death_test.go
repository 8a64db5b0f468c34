package nft

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// bound is how long after an agent's end the state of WhenDown may take.
const bound = 3 * time.Second

func TestTimeoutIsTheOneOfTheHeartbeat(t *testing.T) {
	if rules.AliveTimeout != intercept.HeartbeatTimeout {
		t.Errorf("the set forgets after %v, the heartbeat reckons with %v", rules.AliveTimeout, intercept.HeartbeatTimeout)
	}
}

// agent starts a process that diverts as s says, to listeners of its own.
func (w *world) agent(s rules.State) *netns.Cmd {
	w.t.Helper()
	encoded, err := json.Marshal(s)
	if err != nil {
		w.t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		w.t.Fatal(err)
	}
	cmd := w.Node.Command(exe)
	cmd.Env = append(os.Environ(), childEnv+"="+string(encoded))
	out, err := cmd.StdoutPipe()
	if err != nil {
		w.t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		w.t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if line != "ready\n" {
		w.t.Fatalf("the agent says %q, %v", line, err)
	}
	return cmd
}

// v4Host is a state whose child listens on IPv4 loopback alone.
func (w *world) v4Host(down rules.WhenDown) rules.State {
	return w.state(func(s *rules.State) {
		s.WhenDown, s.Clients = down, rules.Clients{Host: true}
		s.Diverts[0].Entries, s.Diverts[0].Ports = entries(kas4, svc4), rules.Ports{}
	})
}

var deaths = map[string]struct {
	down rules.WhenDown
	want string
}{"refuse": {rules.Refuse, "refused"}, "direct": {rules.Direct, "kas"}}

func TestKilledAgent(t *testing.T) {
	for name, d := range deaths {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1})
			s := w.v4Host(d.down)
			s.Clients.Pods, s.Diverts[0].Ports = true, w.ports // pods' listeners are ours and live on
			agent := w.agent(s)
			w.want(w.RoutedPods[0], kas4, "pods4")
			if err := agent.Process.Kill(); err != nil {
				t.Fatal(err)
			}
			_ = agent.Wait()
			// Nothing lapses first: the kernel has removed the table by now.
			w.want(w.Node, kas4, d.want)
			w.want(w.RoutedPods[0], kas4, d.want)
			w.cleanup()
			w.want(w.Node, kas4, "kas")
		})
	}
}

// A change of the rules waits for the transactions of others, kube-proxy's say,
// for as long as those take. The agent lives meanwhile, and its heartbeat says so.
func TestHeartbeatDoesNotWaitForApply(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	m := w.apply(w.state(nil))
	m.mu.Lock()
	for busy := time.Now(); time.Since(busy) < bound+intercept.HeartbeatInterval; {
		w.want(w.Node, kas4, "host4")
		if t.Failed() {
			break
		}
	}
	m.mu.Unlock()

	addrs := []netip.AddrPort{svc4}
	g := NewListenGuard(Config{})
	if err := w.Node.Do(func() error { return g.Arm(context.Background(), addrs) }); err != nil {
		t.Fatal(err)
	}
	g.mu.Lock()
	beaten := make(chan error, 1)
	go func() { beaten <- g.Beat() }()
	select {
	case err := <-beaten:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(bound):
		t.Error("the heartbeat of the guard waits for Arm")
	}
	g.mu.Unlock()
	if err := g.Close(); err != nil {
		t.Error(err)
	}
}

// Heartbeats keep an agent alive without a break: past the time after which the
// set forgets, each connect is still diverted.
func TestLivingAgentStaysAlive(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	w.apply(w.state(nil))
	for since := time.Now(); time.Since(since) < bound+time.Second; {
		if got := ask(w.Node, kas4); got != "host4" {
			t.Fatalf("after %v: answered by %q", time.Since(since), got)
		}
	}
}

func TestFrozenAgent(t *testing.T) {
	for name, d := range deaths {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1})
			s := w.v4Host(d.down)
			s.Clients.Pods, s.Diverts[0].Ports = true, w.ports
			agent := w.agent(s)
			if err := agent.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			frozen := time.Now()
			var last string
			for last != d.want && time.Since(frozen) < 2*bound {
				switch last = ask(w.RoutedPods[0], kas4); last {
				case "pods4", d.want:
				default:
					t.Errorf("%v after the freeze: %q", time.Since(frozen), last)
				}
			}
			if took := time.Since(frozen); took > bound {
				t.Errorf("%q only after %v", d.want, took)
			}
			w.want(w.Node, kas4, d.want)
			if err := agent.Signal(syscall.SIGCONT); err != nil {
				t.Fatal(err)
			}
			if err := netns.Poll(bound, func() error {
				if got := ask(w.RoutedPods[0], kas4); got != "pods4" {
					return errors.New(got)
				}
				return nil
			}); err != nil {
				t.Errorf("thawed, still %v", err)
			}
		})
	}
}

// No connect blocks longer than the bound though the frozen agent's backlog is
// full, and its SYNs keep their nat.
func TestFullBacklogOfAFrozenAgent(t *testing.T) {
	for name, d := range deaths {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
			s := w.v4Host(d.down)
			s.Clients.Pods = true
			agent := w.agent(s)
			if err := agent.Signal(syscall.SIGSTOP); err != nil {
				t.Fatal(err)
			}
			clients := []*netns.Host{w.Node, w.Node, w.Node, w.Node, w.RoutedPods[0], w.RoutedPods[0], w.RoutedPods[0], w.BridgedPods[0], w.BridgedPods[0], w.BridgedPods[0]}
			type result struct {
				from *netns.Host
				err  error
				took time.Duration
			}
			results := make(chan result, len(clients))
			start := time.Now()
			for _, h := range clients {
				go func() {
					c, err := h.DialWith(context.Background(), &net.Dialer{Timeout: 10 * time.Second}, "tcp", kas4.String())
					if err == nil {
						c.Close()
					}
					results <- result{h, err, time.Since(start)}
				}()
			}
			refused := 0
			for range clients {
				r := <-results
				if errors.Is(r.err, syscall.ECONNREFUSED) {
					refused++
				} else if r.err != nil {
					t.Errorf("%s after %v: %v", r.from.Label, r.took, r.err)
				}
				// Linux sends a SYN again each second; the first after the bound is answered.
				if r.took > bound+time.Second {
					t.Errorf("%s: a connect blocked for %v", r.from.Label, r.took)
				}
			}
			if refused == 0 {
				t.Error("the backlog took them all: nothing was tested")
			}
			w.want(w.Node, kas4, d.want)
		})
	}
}

// A SYN sent into nothing before the agent came is not diverted when it is
// sent again: the kernel does nat for the first packet of a connection only.
// Its client is refused instead of waiting, and diverted when it comes again.
func TestCase_B62_SYNSentBeforeTheAgentCame(t *testing.T) {
	for name, down := range map[string]rules.WhenDown{"refuse": rules.Refuse, "direct": rules.Direct} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
			// Something that makes connections known to conntrack, as every node has.
			if err := w.Node.InstallKubeProxy(netns.IptablesNFT, netns.Service{ClusterIP: svc4, Endpoint: kas4}); err != nil {
				t.Fatal(err)
			}
			if _, err := w.ControlPlane.RunInput("table inet hole { chain in { type filter hook input priority 0; tcp dport 6443 counter drop; }; }", "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			clients := []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]}
			targets := []netip.AddrPort{kas4, kas6, svc4}
			results := make(chan string, len(clients)*len(targets))
			for _, h := range clients {
				for _, to := range targets {
					go func() { results <- ask(h, to) }()
				}
			}
			if err := netns.Poll(bound, func() error { return w.dropped(cap(results)) }); err != nil {
				t.Fatal(err)
			}
			w.apply(w.state(func(s *rules.State) { s.WhenDown = down }))
			for range cap(results) {
				if got := <-results; got != "refused" {
					t.Errorf("a waiting client got %q", got)
				}
			}
			for _, h := range clients {
				w.want(h, kas4, w.side(h, kas4))
			}
		})
	}
}

// dropped is an error until n SYNs have come to nothing in the control plane.
func (w *world) dropped(n int) error {
	out, err := w.ControlPlane.Run("nft", "list", "table", "inet", "hole")
	if err != nil {
		return err
	}
	var packets int
	if _, rest, ok := strings.Cut(out, "counter packets "); ok {
		packets, _ = strconv.Atoi(strings.Fields(rest)[0])
	}
	if packets < n {
		return fmt.Errorf("%d of %d SYNs are there", packets, n)
	}
	return nil
}
