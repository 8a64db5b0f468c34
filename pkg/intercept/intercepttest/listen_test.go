package intercepttest

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/listen"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/rules"
)

// Mode listen is put to the suite here, with the guard that the agent gives
// it: package listen itself does not know nft.
func listenFactory() Factory {
	var l listening
	return Factory{
		Name:     listen.Name,
		New:      func(log logrus.FieldLogger) (intercept.Mode, error) { return l.start(log), nil },
		Open:     l.open,
		WhenDown: []rules.WhenDown{rules.Refuse},
		Places:   listenPlaces,
		Cleanup: func(ctx context.Context) error {
			return errors.Join(nft.Cleanup(ctx), intercept.CleanupAddresses(stateDir()), os.RemoveAll(stateDir()))
		},
	}
}

var (
	listenPorts  = map[string]uint16{"kas": 16443, "other": 16444, "third": 16445}
	listenPlaces = map[string][]netip.AddrPort{}
)

func init() {
	for name, port := range listenPorts {
		listenPlaces[name] = []netip.AddrPort{netip.AddrPortFrom(node4, port), netip.AddrPortFrom(node6, port)}
	}
}

// stateDir is one for each node, found again by the next process there.
func stateDir() string {
	ns, err := os.Readlink("/proc/self/ns/net")
	if err != nil {
		panic(err)
	}
	return filepath.Join(os.TempDir(), "kasway-listen-"+ns[len("net:["):len(ns)-1])
}

// listening is mode listen with its parts, as the agent puts them together.
type listening struct {
	*listen.Mode
	addresses *intercept.NodeAddresses
	listeners *intercept.Listeners
	targets   []rules.Target
}

func (l *listening) start(log logrus.FieldLogger) intercept.Mode {
	bind := []netip.Addr{node4, node6}
	server := intercept.NewServer(intercept.ServerConfig{MaxConnections: 1000, Log: log,
		Handle: func(_ context.Context, t intercept.Taken) {
			Converse(t.Conn, t.Target, "")
			_ = t.Conn.Close()
		}})
	l.addresses = intercept.NewNodeAddresses(stateDir(), log)
	l.listeners = intercept.NewListeners(intercept.ListenersConfig{Addresses: bind, Fixed: true, Server: server})
	l.Mode = listen.New(listen.Config{Bind: bind, Addresses: l.addresses, Listeners: l.listeners, Log: log,
		Guard: func() (listen.Guard, error) { return nft.NewListenGuard(nft.Config{Log: log}), nil }})
	return l
}

// open opens the listeners of one more target.
func (l *listening) open(_ *rules.State, d *rules.Divert) ([]Listener, error) {
	if err := l.addresses.Ensure(listen.Wanted([]netip.Addr{node4, node6})...); err != nil {
		return nil, err
	}
	l.targets = append(l.targets, rules.Target{Name: d.Name, Listen: listenPorts[d.Name]})
	ports, err := l.listeners.Set(context.Background(), l.targets)
	d.Ports = ports[d.Name]
	return nil, err
}

// Close closes the listeners too, as the agent does when it stops.
func (l *listening) Close() error {
	l.listeners.Close()
	return l.Mode.Close()
}

func TestListen_Matrix(t *testing.T)              { Run(t, listenFactory()) }
func TestCase_B37_BridgePodsListen(t *testing.T)  { RunBridge(t, listenFactory()) }
func TestListen_Death(t *testing.T)               { RunDeath(t, listenFactory()) }
func TestListen_States(t *testing.T)              { RunStates(t, listenFactory()) }
func TestListen_Existing(t *testing.T)            { RunExisting(t, listenFactory()) }
func TestListen_Cleanup(t *testing.T)             { RunCleanup(t, listenFactory()) }
func TestCase_B98_PolicyCellsListen(t *testing.T) { RunPolicy(t, listenFactory()) }
