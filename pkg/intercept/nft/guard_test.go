package nft

import (
	"context"
	"maps"
	"net/netip"
	"slices"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

func sortedKeys(m map[string][]string) []string { return slices.Sorted(maps.Keys(m)) }

// Mode listen owns its address; nothing is diverted, and without heartbeats
// its clients are refused though the listener is there.
func TestListenGuard(t *testing.T) {
	w := newWorld(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
	addrs := []netip.AddrPort{netip.MustParseAddrPort("10.96.0.1:443"), netip.MustParseAddrPort("[fd00:96::1]:443")}
	for _, a := range addrs {
		w.addLocal(a)
		w.listen(w.Node, a, "listen")
		w.listen(w.Node, netip.AddrPortFrom(a.Addr(), 80), "other")
	}
	everybody := func(want string) {
		t.Helper()
		for _, h := range []*netns.Host{w.Node, w.RoutedPods[0], w.BridgedPods[0]} {
			for _, a := range addrs {
				w.want(h, a, want)
				w.want(h, netip.AddrPortFrom(a.Addr(), 80), "other")
			}
		}
	}
	g := NewListenGuard(Config{})
	if err := g.Beat(); err != nil {
		t.Errorf("before Arm: %v", err)
	}
	arm := func() {
		t.Helper()
		if err := w.Node.Do(func() error { return g.Arm(context.Background(), addrs) }); err != nil {
			t.Fatal(err)
		}
	}
	arm()
	everybody("listen")
	stop := intercept.StartHeartbeat(intercept.HeartbeatInterval, g.Beat, g.cfg.Log, nil)
	defer stop()
	if _, err := w.Node.Run("nft", "flush", "ruleset"); err != nil {
		t.Fatal(err)
	}
	if damage, err := g.Verify(context.Background()); err != nil || len(damage) != 1 {
		t.Errorf("a flushed guard is told of as %v, %v", damage, err)
	}
	if err := g.Beat(); err != nil {
		t.Errorf("without a guard: %v", err)
	}
	arm()
	if damage, err := g.Verify(context.Background()); err != nil || damage != nil {
		t.Errorf("armed again, and told of as %v, %v", damage, err)
	}
	everybody("listen")
	stop()
	silent := time.Now()
	for ask(w.Node, addrs[0]) == "listen" && time.Since(silent) < 2*bound {
		w.want(w.RoutedPods[0], netip.AddrPortFrom(addrs[0].Addr(), 80), "other")
	}
	if took := time.Since(silent); took > bound || took < time.Second {
		t.Errorf("refused after %v", took)
	}
	everybody("refused")
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	everybody("refused")
	arm()
	everybody("listen")
	if err := g.Close(); err != nil {
		t.Fatal(err)
	}
	w.cleanup()
	everybody("listen")
}

func TestCase_B60_CleanupAnyNumberOfTimes(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	w.cleanup() // from nothing
	agent := w.agent(w.v4Host("refuse"))
	if err := w.Node.Do(func() error { return Cleanup(context.Background()) }); err == nil {
		t.Error("the table of a living agent was removed")
	}
	if err := agent.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = agent.Wait()
	if _, err := w.Node.RunInput("table inet kasway_x { }; table ip kasway_y { }; table inet keep { };", "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	w.cleanup()
	w.cleanup()
	out, err := w.Node.Run("nft", "list", "tables")
	if err != nil || out != "table inet keep\n" {
		t.Errorf("left: %q, %v", out, err)
	}
}
