package stories

import (
	"errors"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// What mode tproxy adds to rules is put back as they are: the policy rule that
// leads what is taken to the agent, its routes, and the device that they hang on.
func TestCase_B38_RepairTPROXY(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	for _, family := range []string{"iptables", "ip6tables"} {
		if err := s.Node.Sysctl("net/bridge/bridge-nf-call-"+family, "0"); err != nil {
			t.Fatal(err)
		}
	}
	s.start(t, diverting("tproxy"))
	s.untouched(t, "tproxy")
	for _, m := range []meddling{
		{"deleted rule", "ip rule del preference 91", "rule 91 of IPv4 (fwmark 0x2b/0xff lookup 27511) is gone", "systemd-networkd"},
		{"flushed routes", "ip -6 route flush table 27511", "of table 27511 is gone", "ManageForeignRoutes"},
		{"deleted device", "ip link del kasway0", "device kasway0 is gone or down", "ip link del"},
		{"deleted guard", "nft delete table inet kasway_guard", "table inet kasway_guard is gone", "nft flush ruleset"},
	} {
		s.repaired(t, "tproxy", m)
	}
	if err := s.agent.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	_ = s.agent.Wait() // reports the signal
	if err := netns.Poll(3*time.Second, func() error {
		var errs []error
		for _, h := range s.clients() {
			if err := s.ask(t, h, svc4); !errors.Is(err, syscall.ECONNREFUSED) {
				errs = append(errs, err)
			}
		}
		return errors.Join(errs...)
	}); err != nil {
		t.Errorf("dead for 3 s, and not refused: %v", err)
	}
}
