package cgroupbpf_test

import (
	"net/netip"
	"slices"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// atOnce is how long a refusal may take: it needs no packet, or one on loopback.
const atOnce = 100 * time.Millisecond

// families are connects of each, kinds are of each other kind.
var (
	families = []socketSpec{{To: kas4}, {To: kas6, V6: true}, {To: mapped4, V6: true}}
	kinds    = []socketSpec{{To: kas4, Block: true}, {To: kas4, TFO: true}, {To: kas6, V6: true, TFO: true}, {To: kas4, Proto: unix.IPPROTO_MPTCP}}
)

// refusedAtOnce demands that of connects of the node and of a pod.
func (s *scene) refusedAtOnce(t *testing.T, what string, specs []socketSpec) {
	t.Helper()
	for _, from := range []*netns.Host{s.Node, s.RoutedPods[0]} {
		for _, spec := range specs {
			var r socketResult
			for try := 0; try == 0 || try < 3 && r.Took > atOnce; try++ { // the machine may be busy
				var err error
				if r, err = connectFrom(from, spec); err != nil || unix.Errno(r.Errno) != unix.ECONNREFUSED {
					t.Errorf("%s: %+v: %v, %v; want ECONNREFUSED", what, spec, unix.Errno(r.Errno), err)
				}
			}
			if r.Took > atOnce {
				t.Errorf("%s: %+v: refused after %v, want at once", what, spec, r.Took)
			}
		}
	}
}

// A refused target, and every target of an agent that has stopped, answers with
// ECONNREFUSED and nothing else, at once, to every kind of socket.
func TestRefused(t *testing.T) {
	t.Parallel()
	s := newScene(t, modern, rules.Refuse)
	state := s.state
	for i := range state.Diverts {
		state.Diverts[i].Refused = state.Diverts[i].Name == "kas"
	}
	if _, err := s.holder.Apply(state); err != nil {
		t.Fatal(err)
	}
	s.refusedAtOnce(t, "target refused", slices.Concat(families, kinds))
	if _, err := s.holder.Apply(intercepttest.State(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	s.diverted(t, s.Node, socketSpec{To: kas4}, kas4) // the twin
	s.diverted(t, s.RoutedPods[0], socketSpec{To: kas6, V6: true}, kas6)
	if err := s.holder.Close(); err != nil {
		t.Fatal(err)
	}
	s.refusedAtOnce(t, "agent stopped", families)
}

// Without bpf_set_retval a refusal is a packet that nobody answers but the kernel.
// A pod's stays within the pod: a policy that drops what pods send to the node
// would make the connect hang.
func TestAncientRefusalBehindAPolicy(t *testing.T) {
	t.Parallel()
	s := newScene(t, ancient, rules.Refuse)
	if _, err := s.Node.RunInput("table inet wall { chain in { type filter hook input priority 0; iifname != { lo, eth0 } tcp flags syn drop; }; }", "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	if err := s.holder.Close(); err != nil {
		t.Fatal(err)
	}
	s.refusedAtOnce(t, "agent stopped", families)
}

// A socket may connect more than once: its peer is always the one that it dialled
// last, diverted or not, after a success as after a refusal.
func TestReconnect(t *testing.T) {
	t.Parallel()
	s := newScene(t, modern, rules.Refuse)
	elsewhere := netip.AddrPortFrom(netns.KAS4, port+1000)
	l, err := s.ControlPlane.Listen("tcp4", elsewhere.String())
	if err != nil {
		t.Fatal(err)
	}
	served := make(chan struct{})
	go func() {
		defer close(served)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			intercepttest.Converse(c, "kas", "elsewhere")
			c.Close()
		}
	}()
	defer func() { l.Close(); <-served }()
	again := func() {
		t.Helper()
		s.diverted(t, s.Node, socketSpec{To: kas4, Block: true, Again: elsewhere}, elsewhere)
	}
	again()
	s.diverted(t, s.Node, socketSpec{To: elsewhere, Block: true, Again: kas4}, kas4)
	// Its programs still divert, to where nobody listens any more.
	if err := s.holder.Kill(); err != nil {
		t.Fatal(err)
	}
	again()
}
