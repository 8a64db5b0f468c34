package intercept

import (
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
)

// A listener whose socket somebody has killed is told of, and opened again where
// it was: what is diverted goes on to go there.
func TestDeafListenerIsOpenedAgain(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	if damage := r.listeners.Verify(); damage != nil {
		t.Errorf("untouched, and told of as %v", damage)
	}
	for _, l := range r.listeners.open {
		raw, err := l.tcp.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		if err := raw.Control(func(fd uintptr) { err = syscall.Shutdown(int(fd), syscall.SHUT_RDWR) }); err != nil {
			t.Fatal(err)
		}
	}
	damage := r.listeners.Verify()
	if len(damage) != 2 || !strings.HasSuffix(damage[0].What, " of target kas no longer listens") {
		t.Errorf("told of %v", damage)
	}
	ports, err := r.listeners.Set(t.Context(), []rules.Target{target("kas")})
	if err != nil || ports["kas"] != r.ports {
		t.Fatalf("opened at %v, %v, was at %v", ports, err, r.ports)
	}
	if damage := r.listeners.Verify(); damage != nil {
		t.Errorf("opened again, and told of as %v", damage)
	}
	for _, at := range Placed(loopback(), r.ports) {
		wantEcho(t, dialTo(t, at))
	}
}

func TestVerifyNodeAddresses(t *testing.T) {
	in(t, func(run func(string) string) {
		log, _ := logs(t)
		n := NewNodeAddresses(t.TempDir(), log)
		want := []NodeAddress{{Addr: node4}, {Addr: loopback()[0]}}
		verify := func() (what []string) {
			damage, err := n.Verify(want...)
			if err != nil {
				t.Fatal(err)
			}
			for _, d := range damage {
				what = append(what, d.What)
			}
			return what
		}
		if err := n.Ensure(want...); err != nil {
			t.Fatal(err)
		}
		if got := verify(); got != nil {
			t.Errorf("untouched: %v", got)
		}
		run("ip addr del " + node4.String() + "/32 dev lo")
		if got := verify(); !slices.Equal(got, []string{"node address " + node4.String() + " is gone"}) {
			t.Errorf("deleted: %v", got)
		}
		run("ip link add eth0 type veth peer name far")
		run("ip addr add " + node4.String() + "/32 dev eth0")
		if got := verify(); !slices.Equal(got, []string{"node address " + node4.String() + " is on eth0"}) {
			t.Errorf("moved: %v", got)
		}
		want[0].Borrow = true
		if got := verify(); got != nil {
			t.Errorf("borrowed: %v", got)
		}
	})
}
