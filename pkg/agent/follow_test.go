package agent

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// refused names the targets of s that are refused.
func refused(s rules.State) (names []string) {
	for _, d := range s.Diverts {
		if d.Refused {
			names = append(names, d.Name)
		}
	}
	return names
}

func (r *rig) targetStates() (states []string) {
	for _, t := range r.status().Targets {
		states = append(states, t.State)
	}
	return states
}

func (r *rig) wantStates(kas, other string) {
	r.t.Helper()
	eventually(r.t, "kas "+kas+", other "+other, func() bool {
		return slices.Equal(r.targetStates(), []string{kas, other})
	})
}

// A target that cannot be carried is held: what is diverted stays as it is.
func TestWhenUnreachableHold(t *testing.T) {
	r := newRig(t)
	r.diverting()
	r.wantStates("held", "held")
	held, err := r.dial(kas)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "held", func() bool { return r.metric("kasway_agent_intercept_held") == 1 })
	r.links.set("kas")
	r.wantStates("open", "held")
	r.carried(held, nil)
	r.links.set("other")
	r.wantStates("held", "open")
	r.carried(r.dial(other))
	if n := len(r.mode.Applied()); n != 1 {
		t.Errorf("%d states applied, want 1: the kernel's part has not changed", n)
	}
}

// The held are reset when their time is up.
func TestHeldTooLong(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.Hold = 100 * time.Millisecond
	r.diverting()
	start := time.Now()
	c, err := r.dial(kas)
	if err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) || time.Since(start) < 100*time.Millisecond {
		t.Errorf("after %s: %v, want a reset after 100 ms", time.Since(start), err)
	}
}

func TestWhenUnreachableRefuse(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.diverting()
	if s := r.mode.Applied()[0]; !slices.Equal(refused(s), []string{"kas", "other"}) {
		t.Errorf("at first %v are refused, want both, and never the self-test", refused(s))
	}
	r.wantStates("refused", "refused")
	if _, err := r.dial(kas); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("%v, want ECONNREFUSED", err)
	}
	r.links.set("kas")
	r.mode.newest(t, "kas open", func(s rules.State) bool { return slices.Equal(refused(s), []string{"other"}) })
	r.wantStates("open", "refused")
	r.carried(r.dial(kas))
	r.links.set()
	r.mode.newest(t, "both refused", func(s rules.State) bool { return len(refused(s)) == 2 })
	r.wantStates("refused", "refused")
}

// What was taken before the kernel knew is not held either.
func TestWhenUnreachableRefuseHoldsNothing(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.diverting()
	c, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), r.mode.Applied()[0].Diverts[0].Ports.Host4).String())
	if err == nil {
		defer shut(c)
		_ = c.SetDeadline(time.Now().Add(bound))
		_, err = c.Read(make([]byte, 1))
	}
	if !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("%v, want a reset at once", err)
	}
}

// Nor what is taken while the last link is being lost, between two looks at it.
func TestWhenUnreachableRefuseHoldsNothingMeanwhile(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.links.once = "kas"
	r.diverting()
	if got := refused(r.mode.Applied()[0]); !slices.Equal(got, []string{"other"}) {
		t.Fatalf("%v are refused", got)
	}
	start := time.Now()
	c, err := r.dial(kas)
	if err == nil {
		_, err = c.Read(make([]byte, 1))
	}
	if took := time.Since(start); !errors.Is(err, syscall.ECONNRESET) || took > 3*time.Second {
		t.Errorf("%v after %s, want a reset at once", err, took)
	}
}

// A link that comes up before the mode is chosen is not missed.
func TestChangeWhileChoosing(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.mode.onApply = func(context.Context, rules.State) error {
		if len(r.mode.Applied()) == 0 {
			r.links.set("kas")
		}
		return nil
	}
	r.diverting()
	r.mode.newest(t, "kas open", func(s rules.State) bool { return slices.Equal(refused(s), []string{"other"}) })
	r.wantStates("open", "refused")
}

// Nor is one that comes while another change is being applied.
func TestChangeWhileApplying(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.mode.onApply = func(_ context.Context, s rules.State) error {
		if slices.Equal(refused(s), []string{"other"}) {
			r.links.set("kas", "other")
		}
		return nil
	}
	r.diverting()
	r.links.set("kas")
	r.mode.newest(t, "both open", func(s rules.State) bool { return len(refused(s)) == 0 })
}

// names is a DNS server that answers with one address, which may change, and
// takes its time for the first answer.
type names struct {
	addr  atomic.Pointer[netip.Addr]
	first sync.Once
}

// thinks is well within firstNames.
const thinks = firstNames / 5

func (n *names) set(addr string) {
	a := netip.MustParseAddr(addr)
	n.addr.Store(&a)
}

func (n *names) lookup(ctx context.Context, network, host string) ([]netip.Addr, error) {
	n.first.Do(func() { time.Sleep(thinks) })
	a := n.addr.Load()
	switch {
	case a == nil: // a DNS server that does not answer
		<-ctx.Done()
		return nil, ctx.Err()
	case network == "ip6":
		return nil, &net.DNSError{Err: "no such host", Name: host, IsNotFound: true}
	}
	return []netip.Addr{*a}, nil
}

func (r *rig) named(host string, n *names) *rig {
	a, err := rules.ParseAddress(host)
	if err != nil {
		r.t.Fatal(err)
	}
	r.cfg.Agent.Targets[0].Addresses = []rules.Address{a}
	r.cfg.Agent.Intercept.ResolveInterval = 10 * time.Millisecond
	r.cfg.Lookup = n.lookup
	return r
}

func entriesOf(s rules.State, target string) (out []string) {
	for _, d := range s.Diverts {
		for _, e := range d.Entries {
			if d.Name == target {
				out = append(out, netip.AddrPortFrom(e.Prefix.Addr(), e.Port).String())
			}
		}
	}
	return out
}

// The guard that the agent before has left covers what names led to: the first
// State must as well, and later ones follow.
func TestNamesAreFollowed(t *testing.T) {
	var n names
	n.set("192.0.2.7")
	r := newRig(t).named("kas.example:6443", &n)
	r.links.set("kas", "other")
	r.diverting()
	if got := entriesOf(r.mode.Applied()[0], "kas"); !slices.Equal(got, []string{"192.0.2.7:6443"}) {
		t.Errorf("the first state diverts %v", got)
	}
	n.set("192.0.2.8")
	r.mode.newest(t, "the new address", func(s rules.State) bool {
		return slices.Equal(entriesOf(s, "kas"), []string{"192.0.2.8:6443"})
	})
	eventually(t, "in the status", func() bool { return slices.Equal(r.status().Targets[0].Addresses, []string{"192.0.2.8:6443"}) })
}

// A node whose DNS is not there yet diverts what it knows, and says so.
func TestNamesThatDoNotResolve(t *testing.T) {
	var n names
	r := newRig(t).named("kas.example:6443", &n)
	r.links.set("kas", "other")
	start := time.Now()
	r.diverting()
	if took := time.Since(start); took > firstNames+3*time.Second {
		t.Errorf("diverting after %s", took)
	}
	if got := r.mode.Applied()[0]; entriesOf(got, "kas") != nil || len(entriesOf(got, "other")) != 1 {
		t.Errorf("diverted: %v and %v", entriesOf(got, "kas"), entriesOf(got, "other"))
	}
	if got := r.ready(); got != "not ready: nothing is diverted for kas: none of its names has an address yet" {
		t.Errorf("readiness %q", got)
	}
}

// The former state stays, is shown, and the new one is tried again until it is
// in force.
func TestApplyIsTriedAgain(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.links.set("kas", "other")
	r.diverting()
	r.mode.FailApply(errors.New("the table is locked"))
	r.links.set("kas")
	failures := func(n float64) func() bool {
		return func() bool { return r.metric("kasway_agent_apply_failures_total") >= n }
	}
	eventually(t, "failed", failures(1))
	eventually(t, "not ready", func() bool {
		return r.ready() == "not ready: the last change of what is diverted could not be installed: the table is locked"
	})
	if got := refused(r.status().State); got != nil {
		t.Errorf("%v are shown as refused, and are not", got)
	}
	eventually(t, "failed again, without any change", failures(2))
	if n := r.logged(logrus.ErrorLevel, "could not be changed"); n != 1 {
		t.Errorf("%d errors in the log, want one for all attempts", n)
	}
	r.mode.FailApply(nil)
	r.mode.newest(t, "other refused", func(s rules.State) bool { return slices.Equal(refused(s), []string{"other"}) })
	eventually(t, "shown", func() bool { return slices.Equal(refused(r.status().State), []string{"other"}) })
}

// What a failed attempt has left nobody knows: the state before it is applied
// again, too.
func TestApplyAfterAFailureIsNeverSkipped(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.links.set("kas", "other")
	r.diverting()
	r.mode.FailApply(errors.New("the table is locked"))
	r.links.set("kas")
	eventually(t, "failed", func() bool { return r.metric("kasway_agent_apply_failures_total") > 0 })
	r.links.set("kas", "other")
	r.mode.FailApply(nil)
	eventually(t, "applied again", func() bool { return len(r.mode.Applied()) == 2 })
	eventually(t, "ready", func() bool { return r.ready() == "ok" })
}

// Nothing is applied when nothing has changed.
func TestSameStateIsNotApplied(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.WhenUnreachable = config.WhenUnreachableRefuse
	r.diverting()
	for range 3 {
		r.links.set("neither")
		r.links.set()
	}
	r.links.set("kas")
	r.mode.newest(t, "kas open", func(s rules.State) bool { return slices.Equal(refused(s), []string{"other"}) })
	if n := len(r.mode.Applied()); n != 2 {
		t.Errorf("%d states applied, want 2", n)
	}
	asked := func() int { r.links.mu.Lock(); defer r.links.mu.Unlock(); return r.links.asked }
	before := asked()
	time.Sleep(50 * time.Millisecond)
	if n := asked() - before; n > 10 {
		t.Errorf("asked %d times what has changed, while nothing has", n)
	}
}

// The self-test never leaves the node, whatever the links carry.
func TestSelfTestIsNoTarget(t *testing.T) {
	r := newRig(t)
	r.diverting()
	for _, target := range r.status().Targets {
		if target.Name == intercept.SelfTestName {
			t.Error("the self-test is shown as a target")
		}
	}
	if got := entriesOf(r.mode.Applied()[0], intercept.SelfTestName); len(got) != 2 || got[0] != "169.254.77.1:1" {
		t.Errorf("it proves %v, want both families", got)
	}
}

// Somebody who cleans up addresses must not leave pods waiting for ever.
func TestNodeAddressesArePutBack(t *testing.T) {
	r := newRig(t)
	r.links.set("kas", "other")
	r.diverting()
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		t.Fatal(err)
	}
	addr, err := netlink.ParseAddr(intercept.DefaultNode4.String() + "/32")
	if err != nil {
		t.Fatal(err)
	}
	there := func() bool {
		all, err := netlink.AddrList(lo, netlink.FAMILY_V4)
		if err != nil {
			t.Fatal(err)
		}
		return slices.ContainsFunc(all, func(a netlink.Addr) bool { return a.IP.Equal(addr.IP) })
	}
	if !there() {
		t.Fatal("the node's address is not there")
	}
	addr.Scope, addr.Label = unix.RT_SCOPE_HOST, "lo:kasway"
	if err := netlink.AddrDel(lo, addr); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the address is back", there)
}
