package listen

import (
	"context"
	"errors"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/sirupsen/logrus/hooks/test"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// A frozen agent's listeners go on to accept; with the guard of nftables the
// node refuses within 3 s all the same, and not before.
func TestFrozenAgentIsRefused(t *testing.T) {
	node := netns.New(t, netns.Spec{}).Node
	log, _ := test.NewNullLogger()
	bind := []netip.Addr{bind4, bind6, netip.MustParseAddr("127.0.0.1")}
	server := intercept.NewServer(intercept.ServerConfig{MaxConnections: 100, Log: log, Handle: func(_ context.Context, t intercept.Taken) {
		_ = t.Conn.Close()
	}})
	ls := intercept.NewListeners(intercept.ListenersConfig{Addresses: bind, Fixed: true, Server: server})
	defer func() { ls.Close(); _ = server.Shutdown(context.Background()) }()
	addrs := intercept.NewNodeAddresses(t.TempDir(), log)
	mode := New(Config{
		Bind: bind, Addresses: addrs, Listeners: ls, Log: log,
		Guard: func() (Guard, error) { return nft.NewListenGuard(nft.Config{Log: log}), nil },
	})
	var ports rules.Ports
	err := node.Do(func() error {
		if err := addrs.Ensure(Wanted(bind)...); err != nil {
			return err
		}
		p, err := ls.Set(t.Context(), []rules.Target{{Name: "kas", Listen: port}})
		if err != nil {
			return err
		}
		ports = p["kas"]
		return mode.Apply(t.Context(), rules.State{WhenDown: rules.Refuse, Diverts: []rules.Divert{{Name: "kas", Ports: ports}}})
	})
	if err != nil {
		t.Fatal(err)
	}
	connect := func(at netip.AddrPort) error {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		c, err := node.Dial(ctx, "tcp", at.String())
		if err == nil {
			err = c.Close()
		}
		return err
	}
	for start := time.Now(); time.Since(start) < intercept.HeartbeatTimeout+time.Second; time.Sleep(50 * time.Millisecond) {
		for _, at := range intercept.Placed(bind, ports) {
			if err := connect(at); err != nil {
				t.Fatalf("%s while the agent lives: %v", at, err)
			}
		}
	}
	// No beat comes any more, and the listeners stay, as if it were frozen.
	if err := mode.Close(); err != nil {
		t.Fatal(err)
	}
	stopped := time.Now()
	for _, at := range intercept.Placed(bind, ports) {
		for err := connect(at); !errors.Is(err, syscall.ECONNREFUSED); err = connect(at) {
			if time.Since(stopped) > 3*time.Second {
				t.Fatalf("%s 3 s after the last beat: %v, want ECONNREFUSED", at, err)
			}
		}
	}
	t.Logf("refused %v after the last beat", time.Since(stopped).Round(time.Millisecond))
	if err := node.Do(func() error { return nft.Cleanup(t.Context()) }); err != nil {
		t.Fatal(err)
	}
	for _, at := range intercept.Placed(bind, ports) {
		if err := connect(at); err != nil {
			t.Errorf("%s after the clean-up: %v", at, err)
		}
	}
}
