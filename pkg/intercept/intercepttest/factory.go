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
	// WhenDown are the settings that the mode has; nil means both.
	WhenDown []rules.WhenDown
	// Places are where clients connect to reach a target, by its name, one of
	// each family, for a mode that diverts nothing: it has addresses of its own.
	// The targets' addresses are then left alone. nil: the mode diverts.
	Places map[string][]netip.AddrPort
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
		return OpenListeners(s, d)
	}
	return f.Open(s, d)
}

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
