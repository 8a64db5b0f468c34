package intercepttest

import (
	"context"
	"net"
	"net/netip"
	"os"
	"testing"

	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// Factory says how a mode is made and what of the suite applies to it. Its
// functions are called inside the holder.
type Factory struct {
	// Name of the mode, as users write it.
	Name string
	// New makes the mode.
	New func(log logrus.FieldLogger) (intercept.Mode, error)
	// Cleanup removes everything of the mode's, of any generation.
	Cleanup func(ctx context.Context) error
	// Open opens the listeners of one target and enters their ports into d.
	// Those that it returns are served; a mode with an accept loop of its own
	// returns none and hands its connections to Converse. nil: OpenListeners.
	Open func(s *rules.State, d *rules.Divert) ([]Listener, error)
	// Transparent listeners are what the mode diverts to.
	Transparent bool
	// WhenDown are the settings that the mode has; nil means both.
	WhenDown []rules.WhenDown
	// Places are where clients connect to reach a target, by its name, one of
	// each family, for a mode that diverts nothing: it has addresses of its own.
	// The targets' addresses are then left alone. nil: the mode diverts.
	Places map[string][]netip.AddrPort
	// Refuses says with which words the preflight must refuse a node, so that
	// nothing is diverted there; "" or nil: it admits it.
	Refuses func(n Node) string
	// Hooks are the places of the node's cgroup that the mode attaches one
	// program to each, as netns.Attached names them.
	Hooks []string
	// KeepsDestination: the packets of pods have the address that they were sent
	// to when the node's filters see them, so that policies for it are enforced.
	KeepsDestination bool
}

// Listener is a listener of one target.
type Listener struct {
	net.Listener
	// Side is "host" or "pods".
	Side string
}

func (f Factory) whenDown() []rules.WhenDown {
	if f.WhenDown == nil {
		return []rules.WhenDown{rules.Refuse, rules.Direct}
	}
	return f.WhenDown
}

func (f Factory) open(s *rules.State, d *rules.Divert) ([]Listener, error) {
	if f.Open == nil {
		return openListeners(s, d, f.Transparent)
	}
	return f.Open(s, d)
}

func (f Factory) refuses(n Node) string {
	if f.Refuses == nil {
		return ""
	}
	return f.Refuses(n)
}

// fullNode has every kind of client.
func fullNode(proxy netns.KubeProxy) Node { return Node{proxy, true, true} }

// node is one with as many kinds of clients as the mode admits.
func (f Factory) node(proxy netns.KubeProxy) Node {
	n := fullNode(proxy)
	if f.refuses(n) != "" {
		n.BridgePods, n.BridgeNF = false, false
	}
	return n
}

// cgroupEnv gives the holder the node's cgroup.
const cgroupEnv = "KASWAY_INTERCEPTTEST_CGROUP"

// NodeCgroup is, in a holder, the cgroup of everything that runs on its node.
func NodeCgroup() string { return os.Getenv(cgroupEnv) }

// holderEnv names the factory that a process is to be the holder of.
const holderEnv = "KASWAY_INTERCEPTTEST_HOLDER"

// Main runs the tests and looks for leaked goroutines, or, in a process that
// the suite started, holds one of the modes. It does not return.
func Main(m *testing.M, factories ...Factory) {
	name, ok := os.LookupEnv(holderEnv)
	if !ok {
		goleak.VerifyTestMain(m)
		return
	}
	for _, f := range factories {
		if f.Name == name {
			os.Exit(hold(f, os.Stdin, os.Stdout))
		}
	}
	os.Exit(2)
}
