package iptables

import (
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
)

// factory chooses the back end as the agent does: by the kube-proxy that the
// suite installs, so that both are run.
var factory = intercepttest.Factory{
	Name: "iptables",
	New: func(log logrus.FieldLogger) (intercept.Mode, error) {
		return New(Config{Log: log}), nil
	},
	Cleanup: Cleanup,
}

func TestMain(m *testing.M) { intercepttest.Main(m, factory) }

func TestConformance_Matrix(t *testing.T)   { intercepttest.Run(t, factory) }
func TestCase_B37_BridgePods(t *testing.T)  { intercepttest.RunBridge(t, factory) }
func TestConformance_Death(t *testing.T)    { intercepttest.RunDeath(t, factory) }
func TestConformance_States(t *testing.T)   { intercepttest.RunStates(t, factory) }
func TestConformance_Existing(t *testing.T) { intercepttest.RunExisting(t, factory) }
func TestConformance_OwnMark(t *testing.T)  { intercepttest.RunOwnMark(t, factory) }
func TestConformance_Cleanup(t *testing.T)  { intercepttest.RunCleanup(t, factory) }
func TestCase_B98_PolicyCells(t *testing.T) { intercepttest.RunPolicy(t, factory) }
func TestConformance_SamePort(t *testing.T) { intercepttest.RunSamePort(t, factory) }
