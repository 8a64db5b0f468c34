package intercepttest

import (
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/nft"
)

var nftFactory = Factory{
	Name:    "nft",
	New:     func(log logrus.FieldLogger) (intercept.Mode, error) { return nft.New(nft.Config{Log: log}), nil },
	Cleanup: nft.Cleanup,
}

func TestNFT_Matrix(t *testing.T)              { Run(t, nftFactory) }
func TestCase_B37_BridgePodsNFT(t *testing.T)  { RunBridge(t, nftFactory) }
func TestNFT_Death(t *testing.T)               { RunDeath(t, nftFactory) }
func TestNFT_States(t *testing.T)              { RunStates(t, nftFactory) }
func TestNFT_Existing(t *testing.T)            { RunExisting(t, nftFactory) }
func TestNFT_OwnMark(t *testing.T)             { RunOwnMark(t, nftFactory) }
func TestNFT_Cleanup(t *testing.T)             { RunCleanup(t, nftFactory) }
func TestCase_B98_PolicyCellsNFT(t *testing.T) { RunPolicy(t, nftFactory) }

func TestNFT_SamePort(t *testing.T) { RunSamePort(t, nftFactory) }
