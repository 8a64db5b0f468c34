package intercept

import (
	"context"
	"net"
	"net/netip"
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// proven is a State whose self-test connects to at.
func proven(at ...netip.AddrPort) rules.State {
	d := rules.Divert{Name: SelfTestName}
	for _, a := range at {
		d.Entries = append(d.Entries, rules.Entry{Prefix: netip.PrefixFrom(a.Addr(), a.Addr().BitLen()), Port: a.Port()})
	}
	return rules.State{Diverts: []rules.Divert{{Name: "kas"}, d}}
}

func TestSelfTest(t *testing.T) {
	st := NewSelfTest()
	r := newRig(t, ServerConfig{Handle: st.Wrap(echo)})
	ports, err := r.listeners.Set(t.Context(), []rules.Target{target("kas"), target(SelfTestName)})
	if err != nil {
		t.Fatal(err)
	}
	here := Placed(loopback(), ports[SelfTestName])
	if err := st.Prove(t.Context(), proven(here...)); err != nil {
		t.Errorf("a connection that arrives: %v", err)
	}
	wantEcho(t, r.dial(t)) // other targets are left to the next handler

	stranger := dialTo(t, here[0])
	send(t, stranger, strings.Repeat("x", len(nonce{})))
	wantReset(t, stranger)

	var other SelfTest
	other.pending = map[nonce]bool{}
	closed, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	closed.Close()
	for name, c := range map[string]struct {
		by    *SelfTest
		state rules.State
		says  string
	}{
		"another agent's listener": {&other, proven(here[0]), "another process"},
		"one family of two fails":  {st, proven(here[0], unmapped(closed.Addr())), "not diverted"},
		"no address":               {st, proven(), "no address"},
	} {
		if err := c.by.Prove(t.Context(), c.state); err == nil || !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want it to say %q", name, err, c.says)
		}
	}
	for _, s := range []*SelfTest{st, &other} {
		s.mu.Lock()
		if len(s.pending) != 0 {
			t.Error("nonces are left")
		}
		s.mu.Unlock()
	}
}

// A process that echoes whatever it is sent is not this one.
func TestSelfTestMustArriveHere(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	st := NewSelfTest()
	if err := st.Prove(t.Context(), proven(r.addr())); err == nil {
		t.Error("an echo by somebody else passes")
	}
}

func TestSelfTestTimesOut(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0") // accepts nothing
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	ctx, cancel := context.WithTimeout(t.Context(), selfTestTimeout/10)
	defer cancel()
	if err := NewSelfTest().Prove(ctx, proven(unmapped(l.Addr()))); err == nil {
		t.Error("silence passes")
	}
}

// As a mode does it: nobody listens at the entries, the kernel diverts.
func TestSelfTestThroughTheKernel(t *testing.T) {
	topo := netns.New(t, netns.Spec{})
	log, _ := logs(t)
	st := NewSelfTest()
	server := NewServer(ServerConfig{MaxConnections: 10, Handle: st.Wrap(echo), Log: log})
	ls := NewListeners(ListenersConfig{Addresses: loopback(), Server: server})
	defer func() { ls.Close(); _ = server.Shutdown(context.Background()) }()
	state := rules.State{Diverts: []rules.Divert{{Name: SelfTestName, Entries: SelfTestEntries(node4, node6)}}}
	var ports rules.Ports
	prove := func() error { return topo.Node.Do(func() error { return st.Prove(t.Context(), state) }) }
	err := topo.Node.Do(func() error {
		p, err := ls.Set(t.Context(), []rules.Target{target(SelfTestName)})
		ports = p[SelfTestName]
		if err != nil {
			return err
		}
		return NewNodeAddresses(t.TempDir(), log).Ensure(NodeAddress{Addr: node4}, NodeAddress{Addr: node6})
	})
	if err != nil {
		t.Fatal(err)
	}
	if err := prove(); err == nil || !strings.Contains(err.Error(), "not diverted") {
		t.Errorf("before anything is installed: %v", err)
	}
	rule := "table inet t { chain out { type nat hook output priority -110;\n" +
		"ip daddr " + node4.String() + " tcp dport 1 dnat ip to " + netip.AddrPortFrom(loopback()[0], ports.Host4).String() + "\n" +
		"ip6 daddr " + node6.String() + " tcp dport 1 dnat ip6 to " + netip.AddrPortFrom(loopback()[1], ports.Host6).String() + "\n}\n}"
	if _, err := topo.Node.RunInput(rule, "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if err := prove(); err != nil {
		t.Errorf("diverted: %v", err)
	}
}
