package nft

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// While states follow each other, no connect passes by the agent, and every
// one meets the old state or the new one. A way past would lead to "kas".
func TestReplacedWithoutAGapUnderAStorm(t *testing.T) {
	for _, down := range []rules.WhenDown{rules.Refuse, rules.Direct} {
		t.Run(string(down), func(t *testing.T) {
			w := newWorld(t, netns.Spec{RoutedPods: 1})
			other := rules.Ports{
				Host4: w.listen(w.Node, netip.MustParseAddrPort("127.0.0.1:0"), "host4"),
				Pod4:  w.listen(w.Node, netip.AddrPortFrom(node4, 0), "pods4"),
			}
			states := []rules.State{
				w.state(func(s *rules.State) { s.WhenDown = down }),
				w.state(func(s *rules.State) { s.WhenDown, s.Diverts[0].Ports = down, other }),
				w.state(func(s *rules.State) { // another shape, not only other rules
					s.WhenDown, s.Node6 = down, netip.Addr{}
					s.Diverts = append(s.Diverts, rules.Divert{Name: "more", Entries: entries(kas6), Ports: other})
				}),
			}
			m := w.apply(states[0])
			stop := make(chan struct{})
			var wg sync.WaitGroup
			var mu sync.Mutex
			answers := map[string]int{}
			for _, h := range []*netns.Host{w.Node, w.Node, w.RoutedPods[0], w.RoutedPods[0]} {
				want := w.side(h, kas4)
				wg.Go(func() {
					storm := func() error {
						for {
							select {
							case <-stop:
								return nil
							default:
							}
							got := connectAndAsk(kas4)
							if got == want {
								got = "diverted"
							}
							mu.Lock()
							answers[got]++
							mu.Unlock()
						}
					}
					if err := h.Do(storm); err != nil { // one thread for all connects: more of them
						t.Error(err)
					}
				})
			}
			applied := 0
			enough := func() bool {
				mu.Lock()
				defer mu.Unlock()
				return answers["diverted"] >= 1000
			}
			for begun := time.Now(); time.Since(begun) < 3*time.Second || !enough() && time.Since(begun) < 30*time.Second; applied++ {
				w.reapply(m, states[applied%len(states)])
			}
			close(stop)
			wg.Wait()
			t.Logf("%d states, answers %v", applied, answers)
			if answers["diverted"] < 1000 || len(answers) != 1 {
				t.Errorf("answers %v", answers)
			}
		})
	}
}

// connectAndAsk is ask from the calling thread's namespace.
func connectAndAsk(to netip.AddrPort) string {
	c, err := (&net.Dialer{Timeout: 5 * time.Second}).Dial("tcp", to.String())
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return banner(c)
}

// A new generation takes over while the old one is there, and the old one's
// leaving changes nothing.
func TestTwoGenerations(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1})
	old := w.apply(w.state(nil))
	w.want(w.Node, kas4, "host4")
	next := w.state(func(s *rules.State) {
		s.Generation = "t2"
		s.Diverts[0].Ports = rules.Ports{
			Host4: w.listen(w.Node, netip.MustParseAddrPort("127.0.0.1:0"), "next"),
			Pod4:  w.listen(w.Node, netip.AddrPortFrom(node4, 0), "next"),
		}
		s.Diverts[0].Entries = entries(kas4)
	})
	w.apply(next)
	for _, h := range []*netns.Host{w.Node, w.RoutedPods[0]} {
		if got := ask(h, kas4); got != "next" && got != w.side(h, kas4) {
			t.Errorf("both are there, and %q answers", got)
		}
	}
	if err := old.Close(); err != nil {
		t.Fatal(err)
	}
	w.want(w.Node, kas4, "next")
	w.want(w.RoutedPods[0], kas4, "next")
}

// A table of ours that nobody owns is a leftover, and goes with the first Apply.
func TestLeftoversAreSwept(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	stale := w.state(func(s *rules.State) { s.Generation, s.WhenDown = "old", rules.Direct })
	for _, input := range []string{rules.RenderNFT(stale), "table ip kasway_older { }; table inet other { };"} {
		if _, err := w.Node.RunInput(input, "nft", "-f", "-"); err != nil {
			t.Fatal(err)
		}
	}
	w.apply(w.state(nil))
	out, err := w.Node.Run("nft", "list", "tables")
	if err != nil {
		t.Fatal(err)
	}
	if want := "table inet other\ntable inet kasway_t1\ntable inet kasway_guard\n"; out != want {
		t.Errorf("tables\n%swant\n%s", out, want)
	}
}

// The text that `rules` prints is what Apply installs.
func TestPrintedIsWhatIsInstalled(t *testing.T) {
	any4, any6 := netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")
	prefix := func(p string) rules.Entry { return rules.Entry{Prefix: netip.MustParsePrefix(p), Port: 6443} }
	base := rules.Ports{Host4: 1, Host6: 2, Pod4: 3, Pod6: 4}
	for name, change := range map[string]func(*rules.State){
		"plain":   func(*rules.State) {},
		"refused": func(s *rules.State) { s.Diverts[0].Refused = true },
		"direct":  func(s *rules.State) { s.WhenDown = rules.Direct },
		"pods":    func(s *rules.State) { s.Clients.Host = false },
		"v4":      func(s *rules.State) { s.Node6 = netip.Addr{} },
		"prefixes": func(s *rules.State) {
			s.Diverts = append(s.Diverts, rules.Divert{Name: "p", Ports: base, Entries: []rules.Entry{
				prefix("10.9.0.0/16"), prefix("10.8.0.0/13"), prefix("10.128.0.0/9"), prefix("fd00:9::/52"), prefix("fd00:8::/64"), {Prefix: any4, Port: 7}, {Prefix: any6, Port: 7}}})
		},
		"self-test": func(s *rules.State) {
			s.Diverts = append(s.Diverts, rules.Divert{Name: rules.SelfTestName, Ports: base, Entries: []rules.Entry{prefix("198.18.0.1/32")}})
		},
		"many": func(s *rules.State) { // more than a netlink socket holds by default
			for i := range 150 {
				s.Diverts = append(s.Diverts, rules.Divert{Name: fmt.Sprint("n", i), Ports: base, Entries: []rules.Entry{prefix(fmt.Sprintf("10.%d.%d.0/24", i/250, i%250))}})
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			netns.Require(t)
			lab, err := netns.Open()
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = lab.Close() }()
			w := &world{t: t, ports: base}
			s := w.state(change)
			hosts := map[string]*netns.Host{}
			for _, label := range []string{"printed", "installed"} {
				if hosts[label], err = lab.Host(label); err != nil {
					t.Fatal(err)
				}
			}
			if _, err := hosts["printed"].RunInput(rules.RenderNFT(s), "nft", "-f", "-"); err != nil {
				t.Fatal(err)
			}
			m := New(Config{})
			defer func() { _ = m.Close() }()
			for range 2 { // made, and replaced
				if err := hosts["installed"].Do(func() error { return m.Apply(context.Background(), s) }); err != nil {
					t.Fatal(err)
				}
				want, got := ruleset(t, hosts["printed"]), ruleset(t, hosts["installed"])
				if diff := cmp.Diff(want, got); diff != "" {
					t.Errorf("(-printed +installed)\n%s", diff)
				}
			}
			out, err := hosts["installed"].Run("nft", "list", "table", "inet", "kasway_t1")
			if err != nil || !strings.Contains(out, "flags owner") {
				t.Errorf("no owner: %v\n%.200s", err, out)
			}
		})
	}
}

// ruleset is `nft -j list ruleset`, one JSON object a line, without handles,
// owners and the elements of sets, which lapse.
func ruleset(t *testing.T, h *netns.Host) []string {
	t.Helper()
	out, err := h.Run("nft", "-j", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	var doc struct{ Nftables []map[string]map[string]any }
	if err := json.Unmarshal([]byte(out), &doc); err != nil {
		t.Fatal(err)
	}
	sections := map[string][]string{}
	for _, item := range doc.Nftables {
		for kind, object := range item {
			for _, volatile := range []string{"handle", "elem", "flags"} {
				if volatile != "flags" || kind == "table" {
					delete(object, volatile)
				}
			}
			line, err := json.Marshal(item)
			if err != nil {
				t.Fatal(err)
			}
			// Chains are declared in another order; the order of rules is by chain.
			key := fmt.Sprint(kind, object["table"], object["chain"], object["name"])
			if kind != "metainfo" {
				sections[key] = append(sections[key], string(line))
			}
		}
	}
	var lines []string
	for _, key := range sortedKeys(sections) {
		lines = append(lines, sections[key]...)
	}
	return lines
}
