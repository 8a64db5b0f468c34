package intercepttest

import (
	"context"
	"errors"
	"os"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/iptables"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/intercept/tproxy"
	"github.com/kasway/kasway/pkg/rules"
)

// tproxyFactory is mode tproxy with one of its two kinds of rules.
func tproxyFactory(name string, byIPTables bool, clean func(context.Context) error) Factory {
	return Factory{
		Name: name,
		New: func(log logrus.FieldLogger) (intercept.Mode, error) {
			return tproxy.New(tproxy.Config{Clients: rules.Clients{Host: true, Pods: true}, IPTables: byIPTables, Log: log}), nil
		},
		Cleanup:     func(ctx context.Context) error { return errors.Join(clean(ctx), tproxy.Cleanup(ctx)) },
		Transparent: true,
		Refuses: func(n Node) string {
			if n.BridgePods && n.BridgeNF {
				return "bridge cni0 has ports and bridge-nf-call-iptables or bridge-nf-call-ip6tables is 1"
			}
			return ""
		},
		KeepsDestination: true,
	}
}

var (
	tproxyNFT      = tproxyFactory("tproxy", false, nft.Cleanup)
	tproxyIPTables = tproxyFactory("tproxy-iptables", true, iptables.Cleanup)
)

func TestTPROXY_Matrix(t *testing.T)              { Run(t, tproxyNFT) }
func TestCase_B37_BridgePodsTPROXY(t *testing.T)  { RunBridge(t, tproxyNFT) }
func TestTPROXY_Death(t *testing.T)               { RunDeath(t, tproxyNFT) }
func TestTPROXY_States(t *testing.T)              { RunStates(t, tproxyNFT) }
func TestTPROXY_Existing(t *testing.T)            { RunExisting(t, tproxyNFT) }
func TestTPROXY_OwnMark(t *testing.T)             { RunOwnMark(t, tproxyNFT) }
func TestTPROXY_Cleanup(t *testing.T)             { RunCleanup(t, tproxyNFT) }
func TestCase_B98_PolicyCellsTPROXY(t *testing.T) { RunPolicy(t, tproxyNFT) }

func TestTPROXY_IPTablesMatrix(t *testing.T)   { Run(t, tproxyIPTables) }
func TestTPROXY_IPTablesDeath(t *testing.T)    { RunDeath(t, tproxyIPTables) }
func TestTPROXY_IPTablesExisting(t *testing.T) { RunExisting(t, tproxyIPTables) }

// The rest of the suite with iptables takes a minute, and differs from mode
// iptables in its rules alone.
func TestTPROXY_IPTablesAll(t *testing.T) {
	if os.Getenv("FULL") != "1" {
		return // the rules are those of mode iptables, and the plan that of nftables
	}
	t.Run("States", func(t *testing.T) { RunStates(t, tproxyIPTables) })
	t.Run("OwnMark", func(t *testing.T) { RunOwnMark(t, tproxyIPTables) })
	t.Run("Cleanup", func(t *testing.T) { RunCleanup(t, tproxyIPTables) })
	t.Run("Policy", func(t *testing.T) { RunPolicy(t, tproxyIPTables) })
}
