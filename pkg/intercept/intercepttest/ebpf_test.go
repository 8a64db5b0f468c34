package intercepttest

import (
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/cgroupbpf"
)

var ebpfFactory = Factory{
	Name: "ebpf",
	New: func(log logrus.FieldLogger) (intercept.Mode, error) {
		return cgroupbpf.New(cgroupbpf.Config{Cgroup: NodeCgroup(), Log: log}), nil
	},
	Cleanup: cgroupbpf.Cleanup,
	Hooks:   []string{"connect4", "connect6", "getpeername4", "getpeername6", "sockops"},
}

func TestEBPF_Matrix(t *testing.T)              { Run(t, ebpfFactory) }
func TestCase_B37_BridgePodsEBPF(t *testing.T)  { RunBridge(t, ebpfFactory) }
func TestEBPF_Death(t *testing.T)               { RunDeath(t, ebpfFactory) }
func TestEBPF_States(t *testing.T)              { RunStates(t, ebpfFactory) }
func TestEBPF_Existing(t *testing.T)            { RunExisting(t, ebpfFactory) }
func TestEBPF_OwnMark(t *testing.T)             { RunOwnMark(t, ebpfFactory) }
func TestEBPF_Cleanup(t *testing.T)             { RunCleanup(t, ebpfFactory) }
func TestCase_B98_PolicyCellsEBPF(t *testing.T) { RunPolicy(t, ebpfFactory) }
