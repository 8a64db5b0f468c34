package rules

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/sirupsen/logrus"
	"github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// names is a DNS server: per "network host", an answer as addresses separated
// by blanks, "" for none of this family, or "!" for a failure.
type names struct {
	mu      sync.Mutex
	answers map[string]string
	asked   map[string]int
}

func (n *names) set(network, host, answer string) {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.answers == nil {
		n.answers, n.asked = map[string]string{}, map[string]int{}
	}
	n.answers[network+" "+host] = answer
}

func (n *names) count(network, host string) int {
	n.mu.Lock()
	defer n.mu.Unlock()
	return n.asked[network+" "+host]
}

func (n *names) lookup(_ context.Context, network, host string) ([]netip.Addr, error) {
	n.mu.Lock()
	defer n.mu.Unlock()
	n.asked[network+" "+host]++
	switch answer := n.answers[network+" "+host]; answer {
	case "":
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	case "!":
		return nil, &net.DNSError{Err: "server misbehaving", Name: host, IsTemporary: true}
	default:
		var out []netip.Addr
		for _, s := range strings.Fields(answer) {
			out = append(out, netip.MustParseAddr(s))
		}
		return out, nil
	}
}

func resolver(t *testing.T, dns *names, cfg ResolverConfig) (*Resolver, *test.Hook) {
	t.Helper()
	log, hook := test.NewNullLogger()
	log.SetLevel(logrus.DebugLevel)
	cfg.Log = log
	if cfg.Lookup == nil {
		cfg.Lookup = dns.lookup
	}
	return NewResolver(cfg), hook
}

func texts(entries []Entry) string {
	var out []string
	for _, e := range entries {
		out = append(out, fmt.Sprintf("%s:%d", e.Prefix, e.Port))
	}
	return strings.Join(out, " ")
}

func expect(t *testing.T, r *Resolver, target, want string) {
	t.Helper()
	if diff := cmp.Diff(want, texts(r.Entries(target))); diff != "" {
		t.Errorf("entries of %s: %s", target, diff)
	}
}

func TestResolverEntries(t *testing.T) {
	dns := &names{}
	dns.set("ip4", "kas.example", "10.0.0.9 10.0.0.2 10.0.0.9 0.0.0.0 127.0.0.1 169.254.77.1 255.255.255.255 224.0.0.1 ::ffff:10.0.0.1 10.9.0.7")
	dns.set("ip6", "kas.example", "fd00::2 fd00::1 fe80::1%eth0")
	r, _ := resolver(t, dns, ResolverConfig{Targets: []Target{
		target(t, "kas", "kas.example:443", "10.9.0.0/16:443", "kas.example:6443", "10.0.0.1:443"),
		target(t, "other", "nowhere.example:443"),
		target(t, "plain", "[fd00::1]:443", "10.96.0.1:443"),
	}})
	expect(t, r, "kas", "10.0.0.1/32:443 10.9.0.0/16:443")
	if !r.Resolve(t.Context()) {
		t.Error("a first answer is no change")
	}
	expect(t, r, "kas", "10.0.0.1/32:443 10.0.0.1/32:6443 10.0.0.2/32:443 10.0.0.2/32:6443 10.0.0.9/32:443 10.0.0.9/32:6443 "+
		"10.9.0.0/16:443 10.9.0.7/32:6443 fd00::1/128:443 fd00::1/128:6443 fd00::2/128:443 fd00::2/128:6443")
	expect(t, r, "other", "")
	expect(t, r, "plain", "10.96.0.1/32:443 fd00::1/128:443")
	expect(t, r, "unknown", "")
	if n := dns.count("ip4", "kas.example"); n != 1 {
		t.Errorf("a name of two addresses was looked up %d times in a round", n)
	}
	// The order of an answer means nothing.
	dns.set("ip4", "kas.example", "10.9.0.7 10.0.0.1 10.0.0.9 10.0.0.2")
	if r.Resolve(t.Context()) {
		t.Error("a rotated answer is a change")
	}
	dns.set("ip4", "kas.example", "10.0.0.9")
	if !r.Resolve(t.Context()) {
		t.Error("a shorter answer is no change")
	}
}

// The last good answer stays in use, per family, while resolving fails; each
// change of state is logged once and every failure counted.
func TestResolverKeepsLastGoodAnswer(t *testing.T) {
	dns := &names{}
	metrics := NewMetrics(prometheus.NewRegistry())
	r, hook := resolver(t, dns, ResolverConfig{Targets: []Target{target(t, "kas", "kas.example:443")}, Metrics: metrics})
	const both, old = "10.0.0.1/32:443 fd00::1/128:443", "10.0.0.2/32:443 fd00::1/128:443"
	for i, step := range []struct {
		v4, v6   string
		changed  bool
		want     string
		failures float64
		failing  float64
		logged   int
	}{
		{"!", "!", false, "", 1, 1, 1},
		{"!", "!", false, "", 2, 1, 0},
		{"10.0.0.1", "fd00::1", true, both, 2, 0, 2}, // changed, and resolved again
		{"10.0.0.1", "fd00::1", false, both, 2, 0, 0},
		{"!", "!", false, both, 3, 1, 1},
		{"!", "!", false, both, 4, 1, 0},
		{"", "", false, both, 5, 1, 0},                     // no such name
		{"0.0.0.0", "", false, both, 6, 1, 0},              // nothing usable
		{"10.0.0.2", "!", true, old, 7, 1, 1},              // one family could not be asked for
		{"10.0.0.2", "fd00::1", false, old, 7, 0, 1},       // well again
		{"10.0.0.2", "", true, "10.0.0.2/32:443", 7, 0, 1}, // one family is gone
		{"", "fd00::1", true, "fd00::1/128:443", 7, 0, 1},
		{"10.0.0.3", "fd00::1", true, "10.0.0.3/32:443 fd00::1/128:443", 7, 0, 1},
		{"!", "fd00::4", true, "10.0.0.3/32:443 fd00::4/128:443", 8, 1, 2},
	} {
		dns.set("ip4", "kas.example", step.v4)
		dns.set("ip6", "kas.example", step.v6)
		hook.Reset()
		if got := r.Resolve(t.Context()); got != step.changed {
			t.Errorf("step %d: changed = %v", i, got)
		}
		expect(t, r, "kas", step.want)
		if got := testutil.ToFloat64(metrics.failures); got != step.failures {
			t.Errorf("step %d: %v failures counted, want %v", i, got, step.failures)
		}
		if got := testutil.ToFloat64(metrics.failing); got != step.failing {
			t.Errorf("step %d: %v names failing, want %v", i, got, step.failing)
		}
		if got := len(hook.AllEntries()); got != step.logged {
			t.Errorf("step %d: %d log lines, want %d", i, got, step.logged)
		}
	}
}

// What is said of a name that cannot be resolved is one line, and true of what
// is used meanwhile.
func TestResolverSaysWhatStaysInUse(t *testing.T) {
	dns := &names{}
	r, hook := resolver(t, dns, ResolverConfig{Targets: []Target{target(t, "kas", "kas.example:443")}})
	for _, step := range []struct{ v4, v6, says string }{
		{"!", "!", "cannot resolve kas.example; it has no address yet: lookup kas.example: server misbehaving"},
		{"10.0.0.1", "", ""},
		{"", "!", "cannot resolve kas.example; its last known address stays in use: lookup kas.example: server misbehaving"},
		{"10.0.0.1", "fd00::1", ""},
		{"", "", "cannot resolve kas.example; its last 2 known addresses stay in use: the name has no usable address"},
	} {
		dns.set("ip4", "kas.example", step.v4)
		dns.set("ip6", "kas.example", step.v6)
		hook.Reset()
		r.Resolve(t.Context())
		said := ""
		for _, e := range hook.AllEntries() {
			if e.Level == logrus.WarnLevel {
				said += fmt.Sprintf("%s: %v", e.Message, e.Data[logrus.ErrorKey])
			}
		}
		if said != step.says {
			t.Errorf("said %q, want %q", said, step.says)
		}
	}
	if got := both(errors.New("a"), errors.New("b")).Error(); got != "a; b" {
		t.Errorf("two reasons are %q", got)
	}
}

// A name in a hosts file that has one family alone makes Go's resolver answer
// with a *net.AddrError for the other.
func TestResolverHostsFile(t *testing.T) {
	r, hook := resolver(t, nil, ResolverConfig{
		Targets: []Target{target(t, "kas", "kas:443")},
		Lookup: func(_ context.Context, network, host string) ([]netip.Addr, error) {
			if network == "ip6" {
				return nil, &net.AddrError{Err: "no suitable address found", Addr: host}
			}
			return []netip.Addr{netip.MustParseAddr("10.0.0.1")}, nil
		},
	})
	r.Resolve(t.Context())
	expect(t, r, "kas", "10.0.0.1/32:443")
	for _, e := range hook.AllEntries() {
		if e.Level <= logrus.WarnLevel {
			t.Errorf("warned: %s", e.Message)
		}
	}
}

func TestResolverBoundsAnswers(t *testing.T) {
	var v4, v6 []string
	for i := range 200 {
		v4 = append(v4, fmt.Sprintf("10.0.1.%d", i))
		v6 = append(v6, fmt.Sprintf("fd00::%x", i+1))
	}
	dns := &names{}
	dns.set("ip4", "kas.example", strings.Join(v4, " "))
	dns.set("ip6", "kas.example", strings.Join(v6, " "))
	r, hook := resolver(t, dns, ResolverConfig{Targets: []Target{target(t, "kas", "kas.example:443")}})
	r.Resolve(t.Context())
	r.Resolve(t.Context())
	entries := r.Entries("kas")
	if len(entries) != 64 || !entries[31].Prefix.Addr().Is4() || !entries[32].Prefix.Addr().Is6() {
		t.Errorf("%d entries of an answer of 400: %v", len(entries), entries)
	}
	if n := len(hook.AllEntries()); n != 2 {
		t.Errorf("%d log lines; want one about the addresses and one about the bound", n)
	}
}

func TestResolverRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		start, changes := time.Now(), []time.Duration{}
		dns := &names{}
		dns.set("ip4", "kas.example", "!")
		r, _ := resolver(t, dns, ResolverConfig{
			Targets:  []Target{target(t, "kas", "kas.example:443")},
			Interval: 20 * time.Second,
			Changed:  func() { changes = append(changes, time.Since(start)) },
		})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()

		// Without any answer it asks at 0, 1, 3, 7, 15, 31, 51 s.
		time.Sleep(52 * time.Second)
		if n := dns.count("ip4", "kas.example"); n != 7 {
			t.Errorf("asked %d times in 52 s without any answer, want 7", n)
		}
		dns.set("ip4", "kas.example", "10.0.0.1")
		time.Sleep(20 * time.Second) // 72: answered at 71 s
		dns.set("ip4", "kas.example", "10.0.0.2")
		time.Sleep(40 * time.Second) // 112: changed at 91 s, the same at 111 s
		cancel()
		<-done
		if diff := cmp.Diff([]time.Duration{71 * time.Second, 91 * time.Second}, changes); diff != "" {
			t.Errorf("changes told at: %s", diff)
		}
		if n := dns.count("ip4", "kas.example"); n != 10 {
			t.Errorf("asked %d times, want 10", n)
		}
		expect(t, r, "kas", "10.0.0.2/32:443")
	})
}

func TestResolverInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := &names{}
		dns.set("ip4", "kas.example", "10.0.0.1")
		r, _ := resolver(t, dns, ResolverConfig{Targets: []Target{target(t, "kas", "kas.example:443")}})
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { defer close(done); r.Run(ctx) }()
		time.Sleep(2*DefaultResolveInterval + time.Second)
		cancel()
		<-done
		if n := dns.count("ip4", "kas.example"); n != 3 {
			t.Errorf("asked %d times in two intervals, want 3: a name that is resolved is not in a hurry", n)
		}
	})
}

func TestCompact(t *testing.T) {
	got := texts(compact([]Entry{
		entry("10.9.3.1/32", 443), entry("10.9.0.0/24", 443), entry("10.9.0.0/16", 443), entry("10.9.0.0/16", 6443), entry("10.9.0.0/16", 443),
		entry("10.9.0.0/24", 80), entry("fd00::/64", 443), entry("fd00::/48", 443), entry("10.9.3.1/32", 80),
	}))
	if want := "10.9.0.0/16:443 10.9.0.0/16:6443 10.9.0.0/24:80 10.9.3.1/32:80 fd00::/48:443"; got != want {
		t.Errorf("got  %s\nwant %s", got, want)
	}
}

// The end of the context ends a lookup, and leaves no trace of it.
func TestResolverEndsWhileResolving(t *testing.T) {
	asked := make(chan struct{}, 1)
	r, hook := resolver(t, nil, ResolverConfig{
		Targets: []Target{target(t, "kas", "kas.example:443")},
		Lookup: func(ctx context.Context, _, _ string) ([]netip.Addr, error) {
			select {
			case asked <- struct{}{}:
			default:
			}
			<-ctx.Done()
			return nil, ctx.Err()
		},
		Changed: func() { t.Error("told of a change") },
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { defer close(done); r.Run(ctx) }()
	<-asked
	cancel()
	<-done
	if n := len(hook.AllEntries()); n != 0 {
		t.Errorf("%d log lines", n)
	}
}

// A DNS server that never answers holds up neither the other names nor a round.
func TestResolverBoundsLookups(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		dns := &names{}
		dns.set("ip4", "good.example", "10.0.0.1")
		r, _ := resolver(t, nil, ResolverConfig{
			Targets: []Target{target(t, "kas", "slow.example:443", "good.example:443")},
			Lookup: func(ctx context.Context, network, host string) ([]netip.Addr, error) {
				if host == "slow.example" {
					<-ctx.Done()
					return nil, errors.Join(ctx.Err(), io.ErrUnexpectedEOF)
				}
				return dns.lookup(ctx, network, host)
			},
		})
		done := make(chan bool)
		go func() { done <- r.Resolve(t.Context()) }()
		time.Sleep(time.Second)
		expect(t, r, "kas", "10.0.0.1/32:443")
		start := time.Now()
		if changed := <-done; !changed {
			t.Error("no change")
		}
		if took := time.Since(start); took > 2*lookupTimeout {
			t.Errorf("the round took %s", took)
		}
	})
}

func TestResolverWithoutNames(t *testing.T) {
	r, _ := resolver(t, &names{}, ResolverConfig{Targets: []Target{target(t, "kas", "10.0.0.1:443")}})
	r.Run(context.Background()) // returns: there is nothing to wait for
	if r.Resolve(t.Context()) {
		t.Error("a change without names")
	}
}
