package tproxy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// With src_valid_mark the kernel looks for the way back to a client by the mark
// of the client's own packet, which is ours.
func TestCase_B35_SrcValidMark(t *testing.T) {
	for name, f := range factories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			reverseLookups(t, f, map[string]string{"src_valid_mark": "1"}, "net.ipv4.conf.all.src_valid_mark is 1")
		})
	}
}

// A strict reverse path, on all interfaces and each, alone and by the mark.
func TestCase_B36_StrictReversePath(t *testing.T) {
	for name, f := range factories {
		for _, marks := range []string{"0", "1"} {
			t.Run(name+"/src_valid_mark="+marks, func(t *testing.T) {
				t.Parallel()
				reverseLookups(t, f, map[string]string{"rp_filter": "1", "src_valid_mark": marks}, "")
			})
		}
	}
}

// reverseLookups sets sysctls of all interfaces and wants everybody diverted.
func reverseLookups(t *testing.T, f intercepttest.Factory, sysctls map[string]string, note string) {
	t.Helper()
	l := newLab(t, netns.IptablesNFT, pods())
	for name, value := range sysctls {
		l.node("for f in /proc/sys/net/ipv4/conf/*/" + name + "; do echo " + value + " >$f; done")
	}
	l.all("before", "KAS")
	h := l.agent(f)
	r := h.Preflight()
	if r.Err != nil {
		t.Fatal(r.Err)
	}
	if !strings.Contains(strings.Join(r.Notes, "\n"), note) {
		t.Errorf("notes %q, want %q", r.Notes, note)
	}
	l.apply(h, "g1", rules.Refuse)
	l.all("with "+fmt.Sprint(sysctls), "kas")
}

// Whatever somebody deletes is told of by name, with who is known for it, and
// the next Apply puts it back. Meanwhile nothing that is taken leaves the node
// for where it is addressed to.
func TestCase_B38_RuleDeletedComesBack(t *testing.T) {
	for name, f := range factories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, netns.IptablesNFT, pods())
			before := l.snapshot()
			h := l.agent(f)
			l.apply(h, "g1", rules.Refuse)
			if d := l.damage(h); d != "" {
				t.Errorf("untouched, and told of as %s", d)
			}
			cases := []struct{ what, line, want, suspect string }{
				{"rule of IPv4", "ip -4 rule del preference 91", "rule 91 of IPv4 (fwmark 0x2b/0xff lookup 27511) is gone", "systemd-networkd"},
				{"rule of IPv6", "ip -6 rule del preference 91", "rule 91 of IPv6 (fwmark 0x2b/0xff lookup 27511) is gone", "systemd-networkd"},
				{"all rules", "ip rule flush; ip rule add preference 32766 lookup main; ip rule add preference 32767 lookup default", "rule 91 of IPv4", "`ip rule flush`"},
				{"a route", "ip route del table 27511 local 10.96.0.1", "the route local 10.96.0.1/32 of table 27511 is gone", "`ip route flush table all`"},
				{"routes of IPv6", "ip -6 route flush table 27511", "the route local fd00:30::10/128 of table 27511 is gone", "ManageForeignRoutes"},
				{"device down", "ip link set kasway0 down", "device kasway0 is gone or down", "`ip link del`"},
				{"device", "ip link del $(ip -o link show type tun | grep -o 'kasway[0-9]*' | head -n 1)", "is gone or down", "`ip link del`"},
			}
			if name == "iptables" {
				cases = append(cases, []struct{ what, line, want, suspect string }{
					{"mangle", "iptables -t mangle -F", "table mangle (IPv4) is gone", "iptables -F"},
					{"nat", "ip6tables -t nat -F", "table nat (IPv6)", "iptables -F"},
					{"everything", "nft flush ruleset", "KASWAY-GUARD", "firewalld"},
				}...)
			} else {
				cases = append(cases, struct{ what, line, want, suspect string }{"guard", "nft delete table inet kasway_guard", "table inet kasway_guard is gone", "nft flush ruleset"})
			}
			for _, c := range cases {
				l.node(c.line)
				if strings.HasPrefix(c.what, "rule") || strings.Contains(c.what, "device") {
					for _, a := range []netip.AddrPort{endpoint4, endpoint6} {
						if got := sees(l.Node, a, 300*time.Millisecond); got == "KAS" {
							t.Errorf("%s is gone, and %s is reached past the agent", c.what, a)
						}
					}
				}
				if d := l.damage(h); !strings.Contains(d, c.want) || !strings.Contains(d, c.suspect) {
					t.Errorf("%s is gone: told of as %q, want %q and %q", c.what, d, c.want, c.suspect)
				}
				l.apply(h, "g1", rules.Refuse)
				if d := l.damage(h); d != "" {
					t.Errorf("%s was put back, and still: %s", c.what, d)
				}
				l.all(c.what+" was put back", "kas")
			}
			if name == "nft" { // else kube-proxy's rules are gone with ours
				l.end(h, before)
			}
		})
	}
}

// What Preflight would have refused may come later.
func TestVerifyTellsOfObstacles(t *testing.T) {
	l := newLab(t, netns.NoKubeProxy, pods())
	h := l.agent(factories["nft"])
	l.apply(h, "g1", rules.Refuse)
	l.node("echo 1 >/proc/sys/net/bridge/bridge-nf-call-iptables")
	if d := l.damage(h); !strings.Contains(d, "bridge cni0 has ports and bridge-nf-call-iptables") || !strings.Contains(d, "br_netfilter") {
		t.Errorf("told of as %q", d)
	}
	l.node("echo 0 >/proc/sys/net/bridge/bridge-nf-call-iptables")
	if d := l.damage(h); d != "" {
		t.Errorf("mended, and still: %s", d)
	}
}

// The second agent takes over without a failed connect, what the first has
// taken lives on beside it and after it has stopped diverting, and its end
// takes nothing of the second's away.
func TestTwoGenerations(t *testing.T) {
	for name, f := range factories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, netns.IptablesNFT, pods())
			before := l.snapshot()
			first := l.agent(f)
			l.apply(first, "g1", rules.Refuse)
			var held []func(string)
			for _, c := range l.clients() {
				for _, a := range addresses {
					held = append(held, l.hold(c, a, "kas"))
				}
			}
			still := func(when string) {
				t.Helper()
				for _, ask := range held {
					ask(when)
				}
			}
			second := l.agent(f)
			l.apply(second, "g2", rules.Refuse)
			still("beside a second agent")
			l.all("with two agents", "kas")
			if err := first.Close(); err != nil {
				t.Fatal(err)
			}
			if d := l.damage(second); d != "" {
				t.Errorf("the first has closed, and the second tells of %s", d)
			}
			still("after the first has stopped diverting")
			l.all("with the second agent", "kas")
			if name == "nft" {
				if err := second.Cleanup(); err == nil {
					t.Error("cleaned up beside two living agents")
				}
				l.apply(second, "g2", rules.Refuse) // the guard is nobody's to keep
				l.all("after cleanup beside living agents", "kas")
			}
			if err := first.Kill(); err != nil {
				t.Fatal(err)
			}
			l.all("after the first is gone", "kas")
			if d := l.damage(second); d != "" {
				t.Errorf("told of as %s", d)
			}
			l.end(second, before)
		})
	}
}

// A killed agent's guard is adopted with everything else that it has left.
func TestAdoptedAfterAKill(t *testing.T) {
	for name, f := range factories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, netns.IptablesNFT, pods())
			before := l.snapshot()
			first := l.agent(f)
			l.apply(first, "g1", rules.Refuse)
			if err := first.Kill(); err != nil {
				t.Fatal(err)
			}
			if routes := l.node("ip route show table 27511; ip -6 route show table 27511"); routes != "" {
				t.Errorf("the agent is dead, and its routes are\n%s", routes)
			}
			if err := netns.Poll(3*time.Second, func() error {
				if got := sees(l.Node, cluster4, patience); got != "refused" {
					return errors.New(got)
				}
				return nil
			}); err != nil {
				t.Errorf("dead for 3 s, and a connect meets %v", err)
			}
			l.all("dead", "refused")
			second := l.agent(f)
			l.apply(second, "g2", rules.Refuse)
			l.all("adopted", "kas")
			l.end(second, before)
		})
	}
}

// Clients that knock at a frozen agent whose backlog is full are refused, once
// it is taken for dead; none of them waits on.
func TestFullBacklogOfAFrozenAgent(t *testing.T) {
	for name, f := range factories {
		for _, when := range []rules.WhenDown{rules.Refuse, rules.Direct} {
			t.Run(name+"/"+string(when), func(t *testing.T) {
				t.Parallel()
				l := newLab(t, netns.IptablesNFT, pods())
				l.node("echo 1 >/proc/sys/net/core/somaxconn") // the listeners' backlog
				h := l.agent(f)
				l.apply(h, "g1", when)
				l.all("alive", "kas")
				if err := h.Signal(syscall.SIGSTOP); err != nil {
					t.Fatal(err)
				}
				clients := l.clients()
				const each = 5
				results := make(chan string, len(clients)*each)
				for _, c := range clients {
					for range each {
						go func() { results <- knock(c, cluster4) }()
					}
				}
				met := map[string]int{}
				for range cap(results) {
					met[<-results]++
				}
				if met["refused"] == 0 || met["refused"]+met["connected"] != cap(results) {
					t.Errorf("clients met %v", met)
				}
				if err := h.Signal(syscall.SIGCONT); err != nil {
					t.Fatal(err)
				}
			})
		}
	}
}

// A SYN that was sent into nothing before the agent came, and that others may
// translate, is not taken when it is sent again: its client is refused instead
// of waiting, and taken when it comes again.
func TestSYNSentBeforeTheAgentCame(t *testing.T) {
	for name, f := range factories {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := newLab(t, netns.IptablesNFT, pods())
			if _, err := l.ControlPlane.RunInput("table inet hole { chain in { type filter hook input priority 0; tcp dport 6443 counter drop; }; }", "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			clients := l.clients()
			results := make(chan string, len(clients))
			for _, c := range clients {
				go func() { results <- knock(c, cluster4) }()
			}
			if err := netns.Poll(patience, func() error {
				out, err := l.ControlPlane.Run("nft", "list", "table", "inet", "hole")
				if err == nil && strings.Contains(out, "packets 0 ") {
					err = errors.New("nothing was sent")
				}
				return err
			}); err != nil {
				t.Fatal(err)
			}
			l.apply(l.agent(f), "g1", rules.Refuse)
			met := map[string]int{}
			for range clients {
				met[<-results]++
			}
			if met["refused"] == 0 || met["refused"]+met["connected"] != len(clients) {
				t.Errorf("clients met %v", met)
			}
			l.all("with the agent", "kas")
		})
	}
}

// knock connects, and says what came of it.
func knock(from *netns.Host, to netip.AddrPort) string {
	begun := time.Now()
	flow, err := intercepttest.Connect(from, to, false, 2*patience)
	took := time.Since(begun)
	switch {
	// Linux sends a SYN again each second; the first after the bound is answered.
	case took > 4*time.Second:
		return fmt.Sprintf("nothing for %s: %v", took, err)
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	flow.End()
	return "connected"
}

// What an accepted socket calls its own address is what the client dialled; the
// target is the listener's.
func TestOriginalAndTarget(t *testing.T) {
	l := newLab(t, netns.IptablesNFT, pods())
	node4, node6 := intercepttest.State(rules.Refuse).Node4, intercepttest.State(rules.Refuse).Node6
	for _, a := range []netip.Addr{node4, node6} {
		if err := l.Node.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	described, seen := make(chan dial.Target, 1), make(chan struct{})
	log := logrus.New()
	log.SetOutput(t.Output())
	gates := intercept.NewGates(10, nil)
	gates.Set("kas", intercept.Open)
	gates.Set("other", intercept.Open)
	taken := make(chan intercept.Taken, 1)
	var sockets *intercept.Sockets
	if err := l.Node.Do(func() (err error) { sockets, err = intercept.NewSockets(); return err }); err != nil {
		t.Fatal(err)
	}
	who := intercept.NewWho(intercept.WhoConfig{Sockets: sockets})
	defer who.Close()
	forward := intercept.NewForwarder(intercept.ForwardConfig{
		Gates: gates, Who: who, Log: log,
		Dial: func(_ context.Context, d dial.Target) (dial.Conn, error) {
			described <- d
			<-seen
			return nil, dial.ErrDenied
		},
	})
	server := intercept.NewServer(intercept.ServerConfig{MaxConnections: 100, Log: log,
		Admit:  func(c *intercept.Taken) error { c.FromHost = c.Side == intercept.HostSide; return nil },
		Handle: func(ctx context.Context, c intercept.Taken) { taken <- c; forward.Handle(ctx, c) }})
	listeners := intercept.NewListeners(intercept.ListenersConfig{Transparent: true, Server: server,
		Addresses: []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback(), node4, node6}})
	m := New(Config{Clients: everybody})
	s := intercepttest.State(rules.Direct)
	if err := l.Node.Do(func() error {
		ports, err := listeners.Set(t.Context(), []rules.Target{{Name: "kas"}, {Name: "other"}})
		if err != nil {
			return err
		}
		for i := range s.Diverts {
			s.Diverts[i].Ports = ports[s.Diverts[i].Name]
		}
		return m.Apply(t.Context(), s)
	}); err != nil {
		t.Fatal(err)
	}
	defer func() {
		listeners.Close()
		if err := errors.Join(m.Close(), l.Node.Do(func() error { return factories["nft"].Cleanup(context.Background()) }), server.Shutdown(t.Context())); err != nil {
			t.Error(err)
		}
	}()
	for _, c := range l.clients() {
		for _, d := range s.Diverts {
			for _, e := range d.Entries {
				to := netip.AddrPortFrom(e.Prefix.Addr(), e.Port)
				flow, err := intercepttest.Connect(c, to, false, patience)
				if err != nil {
					t.Fatalf("%s at %s: %v", c.Label, to, err)
				}
				got, target := <-taken, <-described
				side := intercept.PodSide
				if c == l.Node {
					side = intercept.HostSide
				}
				if got.Local != to || got.Target != d.Name || got.Side != side || !got.Transparent {
					t.Errorf("%s at %s: taken at %s for %s (%s)", c.Label, to, got.Local, got.Target, got.Side)
				}
				if target.Original != to || target.Name != d.Name {
					t.Errorf("%s at %s: described as %s, meant %s", c.Label, to, target.Name, target.Original)
				}
				seen <- struct{}{}
				if target.UIDKnown != got.FromHost || target.UID != 0 {
					t.Errorf("%s at %s: user %d, known: %t", c.Label, to, target.UID, target.UIDKnown)
				}
				flow.End()
			}
		}
	}
}

// What carries the mark of our own sockets must never carry that of what is
// taken.
func TestMarksMustDiffer(t *testing.T) {
	s := intercepttest.State(rules.Refuse)
	s.Mark, s.MarkMask = 0x2b, 0x0f
	if err := New(Config{}).Apply(t.Context(), s); err == nil || !strings.Contains(err.Error(), "choose another") {
		t.Errorf("applied: %v", err)
	}
}

// Close before Apply, and twice, does nothing.
func TestCloseOfNothing(t *testing.T) {
	m := New(Config{})
	if err := errors.Join(m.Close(), m.Close()); err != nil {
		t.Error(err)
	}
	if d, err := m.Verify(t.Context()); d != nil || err != nil {
		t.Errorf("%v, %v", d, err)
	}
}
