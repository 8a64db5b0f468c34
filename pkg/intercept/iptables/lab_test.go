package iptables

import (
	"bufio"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// patience bounds what nothing should hinder; machines that run this are busy.
const patience = 5 * time.Second

// lab is a node with a routed and a bridge pod, and a control plane that
// answers as "KAS" at all addresses of the target.
type lab struct {
	*netns.Topology
	t *testing.T
}

var (
	cluster4  = netip.AddrPortFrom(netns.ClusterIP4, 443)
	cluster6  = netip.AddrPortFrom(netns.ClusterIP6, 443)
	endpoint4 = netip.AddrPortFrom(netns.KAS4, 6443)
	endpoint6 = netip.AddrPortFrom(netns.KAS6, 6443)
	addresses = []netip.AddrPort{cluster4, cluster6, endpoint4, endpoint6}
)

func newLab(t *testing.T) *lab {
	t.Helper()
	plan := netns.DefaultPlan()
	plan.KAS = append(plan.KAS, netns.ClusterIP4, netns.ClusterIP6)
	l := &lab{netns.New(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true, Neighbour: true, Plan: &plan}), t}
	for _, a := range addresses {
		l.serve(l.ControlPlane, a, "KAS")
	}
	return l
}

// serve answers at an address of h as who.
func (l *lab) serve(h *netns.Host, at netip.AddrPort, who string) {
	l.t.Helper()
	ln, err := h.Listen("tcp", at.String())
	if err != nil {
		l.t.Fatal(err)
	}
	done := make(chan struct{})
	l.t.Cleanup(func() { ln.Close(); <-done })
	go func() {
		defer close(done)
		for {
			c, err := ln.Accept()
			if err != nil {
				return
			}
			answer(c, who)
		}
	}()
}

// answer answers one line.
func answer(c net.Conn, who string) {
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(patience))
	line, err := bufio.NewReader(c).ReadString('\n')
	if err == nil {
		_ = json.NewEncoder(c).Encode(intercepttest.Answer{Nonce: strings.TrimSpace(line), Who: who})
	}
}

// agent starts a holder of the mode on the node.
func (l *lab) agent() *intercepttest.Holder {
	l.t.Helper()
	h, err := intercepttest.Start(l.Node, factory)
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

// apply applies a state with the target alone, in generation g.
func (l *lab) apply(h *intercepttest.Holder, g string, when rules.WhenDown) rules.State {
	l.t.Helper()
	s := intercepttest.State(when)
	s.Generation = g
	s.Diverts = s.Diverts[:1]
	s, err := h.Apply(s)
	if err != nil {
		l.t.Fatal(err)
	}
	return s
}

// sees is who answers a connect: "kas" (diverted), "KAS", "refused", or an error.
func (l *lab) sees(from *netns.Host, to netip.AddrPort) string {
	flow, err := intercepttest.Connect(from, to, false, patience)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return "refused"
	case err != nil:
		return err.Error()
	}
	defer flow.End()
	a, err := flow.Ask(patience)
	if err != nil {
		return err.Error()
	}
	return a.Who
}

func (l *lab) clients() map[string]*netns.Host {
	return map[string]*netns.Host{"host": l.Node, "routed pod": l.RoutedPods[0], "bridge pod": l.BridgedPods[0]}
}

// all wants every client to meet want at every address.
func (l *lab) all(when, want string, at ...netip.AddrPort) {
	l.t.Helper()
	if len(at) == 0 {
		at = addresses
	}
	for name, c := range l.clients() {
		for _, a := range at {
			if got := l.sees(c, a); got != want {
				l.t.Errorf("%s: %s at %s meets %s, want %s", when, name, a, got, want)
			}
		}
	}
}

// node runs a command on the node.
func (l *lab) node(line string) string {
	l.t.Helper()
	f := strings.Fields(line)
	out, err := l.Node.Run(f[0], f[1:]...)
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

// kubeProxy installs rules of a kind for both families.
func (l *lab) kubeProxy(kind netns.KubeProxy) {
	l.t.Helper()
	err := l.Node.InstallKubeProxy(kind,
		netns.Service{ClusterIP: cluster4, Endpoint: endpoint4}, netns.Service{ClusterIP: cluster6, Endpoint: endpoint6})
	if err != nil {
		l.t.Fatal(err)
	}
}

// eventually polls what has no event.
func (l *lab) eventually(within time.Duration, f func() error) {
	l.t.Helper()
	if err := netns.Poll(within, f); err != nil {
		l.t.Error(err)
	}
}
