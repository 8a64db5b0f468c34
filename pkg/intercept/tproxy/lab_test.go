package tproxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/intercept/iptables"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// patience bounds what nothing should hinder; machines that run this are busy.
const patience = 5 * time.Second

var everybody = rules.Clients{Host: true, Pods: true}

func factory(name string, byIPTables bool, clean func(context.Context) error) intercepttest.Factory {
	return intercepttest.Factory{
		Name: name, Transparent: true,
		New: func(log logrus.FieldLogger) (intercept.Mode, error) {
			return New(Config{Clients: everybody, IPTables: byIPTables, Log: log}), nil
		},
		Cleanup: func(ctx context.Context) error { return errors.Join(clean(ctx), Cleanup(ctx)) },
	}
}

// factories are both kinds of rules.
var factories = map[string]intercepttest.Factory{
	"nft":      factory("nft", false, nft.Cleanup),
	"iptables": factory("iptables", true, iptables.Cleanup),
}

func TestMain(m *testing.M) {
	if os.Getenv(preflightEnv) != "" {
		r := New(Config{Clients: everybody}).Preflight(context.Background())
		fmt.Println(errors.Is(r.Err, intercept.ErrPrivilege), r.Err, r.Remedy)
		return
	}
	intercepttest.Main(m, factories["nft"], factories["iptables"])
}

var (
	cluster4  = netip.AddrPortFrom(netns.ClusterIP4, 443)
	cluster6  = netip.AddrPortFrom(netns.ClusterIP6, 443)
	endpoint4 = netip.AddrPortFrom(netns.KAS4, 6443)
	endpoint6 = netip.AddrPortFrom(netns.KAS6, 6443)
	addresses = []netip.AddrPort{cluster4, cluster6, endpoint4, endpoint6}
)

// lab is a node with a routed and a bridge pod, and a control plane that
// answers as "KAS" at the target's endpoints, which kube-proxy leads to.
type lab struct {
	*netns.Topology
	t *testing.T
}

func newLab(t *testing.T, proxy netns.KubeProxy, spec netns.Spec) *lab {
	t.Helper()
	l := &lab{netns.New(t, spec), t}
	if err := l.Node.InstallKubeProxy(proxy, netns.Service{ClusterIP: cluster4, Endpoint: endpoint4}, netns.Service{ClusterIP: cluster6, Endpoint: endpoint6}); err != nil {
		t.Fatal(err)
	}
	for _, a := range []netip.AddrPort{endpoint4, endpoint6} {
		l.serve(l.ControlPlane, a, "KAS")
	}
	return l
}

// pods is a spec with both kinds.
func pods() netns.Spec { return netns.Spec{RoutedPods: 1, BridgePods: 1} }

// serve answers at an address of h as who, every line of each connection.
func (l *lab) serve(h *netns.Host, at netip.AddrPort, who string) {
	l.t.Helper()
	ln, err := h.Listen("tcp", at.String())
	if err != nil {
		l.t.Fatal(err)
	}
	l.accept(ln, func(c net.Conn) { intercepttest.Converse(c, who, "") })
}

// accept hands out connections until the test ends.
func (l *lab) accept(ln net.Listener, handle func(net.Conn)) {
	done := make(chan struct{})
	l.t.Cleanup(func() { _ = ln.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			l.t.Cleanup(func() { _ = c.Close() })
			go handle(c)
		}
	}()
}

// agent starts a holder of the mode on the node.
func (l *lab) agent(f intercepttest.Factory) *intercepttest.Holder {
	l.t.Helper()
	h, err := intercepttest.Start(l.Node, f)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(func() {
		if l.t.Failed() {
			l.t.Logf("the holder logged:\n%s", h.Log())
		}
	})
	return h
}

// apply applies a state with one target, in generation g.
func (l *lab) apply(h *intercepttest.Holder, g string, when rules.WhenDown) {
	l.t.Helper()
	s := intercepttest.State(when)
	s.Generation = g
	s.Diverts = s.Diverts[:1]
	if _, err := h.Apply(s); err != nil {
		l.t.Fatal(err)
	}
}

// sees is who answers a connect: "kas" (diverted), "KAS", "refused", or an error.
func sees(from *netns.Host, to netip.AddrPort, within time.Duration) string {
	flow, err := intercepttest.Connect(from, to, false, within)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	defer flow.End()
	a, err := flow.Ask(within)
	if err != nil {
		return err.Error()
	}
	return a.Who
}

func (l *lab) clients() []*netns.Host {
	return append(append([]*netns.Host{l.Node}, l.RoutedPods...), l.BridgedPods...)
}

// all wants every client to meet want at every address.
func (l *lab) all(when, want string) {
	l.t.Helper()
	for _, c := range l.clients() {
		for _, a := range addresses {
			if got := sees(c, a, patience); got != want {
				l.t.Errorf("%s: %s at %s meets %s, want %s", when, c.Label, a, got, want)
			}
		}
	}
}

// node runs a shell's line on the node.
func (l *lab) node(line string) string {
	l.t.Helper()
	out, err := l.Node.Run("sh", "-ec", line)
	if err != nil {
		l.t.Fatal(err)
	}
	return out
}

func (l *lab) snapshot() netns.Snapshot {
	l.t.Helper()
	s, err := l.Node.Snapshot(netns.Around{})
	if err != nil {
		l.t.Fatal(err)
	}
	return s
}

// damage is what Verify tells of, one line each, with the suspects.
func (l *lab) damage(h *intercepttest.Holder) string {
	l.t.Helper()
	all, err := h.Verify()
	if err != nil {
		l.t.Fatal(err)
	}
	var lines []string
	for _, d := range all {
		lines = append(lines, d.What+" ["+d.Suspects+"]")
	}
	return strings.Join(lines, "\n")
}

// hold connects and proves that who answers; the result asks once more.
func (l *lab) hold(from *netns.Host, to netip.AddrPort, who string) func(when string) {
	l.t.Helper()
	flow, err := intercepttest.Connect(from, to, false, patience)
	if err != nil {
		l.t.Fatal(err)
	}
	l.t.Cleanup(flow.End)
	ask := func(when string) {
		l.t.Helper()
		if a, err := flow.Ask(patience); err != nil || a.Who != who {
			l.t.Errorf("%s: %s at %s is answered by %q, %v; want %s", when, from.Label, to, a.Who, err, who)
		}
	}
	ask("at once")
	return ask
}

// end ends a holder that still runs, and wants nothing left.
func (l *lab) end(h *intercepttest.Holder, before netns.Snapshot) {
	l.t.Helper()
	if err := errors.Join(h.Close(), h.Cleanup(), h.Cleanup(), h.End()); err != nil {
		l.t.Error(err)
	}
	for _, line := range before.Diff(l.snapshot()) {
		l.t.Errorf("left behind: %s", line)
	}
}
