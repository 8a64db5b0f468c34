package cgroupbpf_test

import (
	"fmt"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// A SYN sent into nothing before the agent came would be sent again and again
// where it went. The host's client is interrupted, and diverted when it comes
// again.
func TestCase_B62_ConnectBeforeTheAgentCame(t *testing.T) {
	t.Parallel()
	s := &scene{Topology: netns.New(t, netns.Spec{RoutedPods: 1})}
	s.holder = s.start(t, modern)
	if _, err := s.ControlPlane.RunInput(`table inet hole { chain in { type filter hook input priority 0
		tcp dport 6443 counter drop; }; }`, "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	targets := []socketSpec{{To: kas4, Block: true}, {To: kas6, V6: true, Block: true}, {To: mapped4, V6: true, Block: true}}
	answers := make(chan error, len(targets))
	began := time.Now()
	for _, spec := range targets {
		go func() {
			r, err := connectFrom(s.Node, spec)
			if err == nil && unix.Errno(r.Errno) != unix.ECONNABORTED {
				err = fmt.Errorf("%s: %w, want ECONNABORTED", spec.To, unix.Errno(r.Errno))
			}
			answers <- err
		}()
	}
	if err := netns.Poll(10*time.Second, func() error { return s.dropped(len(targets)) }); err != nil {
		t.Fatal(err)
	}
	var err error
	if s.state, err = s.holder.Apply(intercepttest.State(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	for range targets {
		if err := <-answers; err != nil {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	}
	for _, spec := range targets {
		s.diverted(t, s.Node, spec, spec.To)
	}
}

// dropped is an error until n SYNs have come to nothing in the control plane.
func (s *scene) dropped(n int) error {
	out, err := s.ControlPlane.Run("nft", "list", "table", "inet", "hole")
	if err != nil {
		return err
	}
	packets := 0
	if _, rest, ok := strings.Cut(out, "counter packets "); ok {
		packets, _ = strconv.Atoi(strings.Fields(rest)[0])
	}
	if packets < n {
		return fmt.Errorf("%d of %d SYNs are there", packets, n)
	}
	return nil
}
