package stories

import (
	"fmt"
	"net/http"
	"syscall"
	"testing"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// As in a DaemonSet's surge: a second agent becomes ready beside the first, the
// first is stopped, and the node's clients are served all along.
func TestSecondAgentTakesOver(t *testing.T) {
	for _, mode := range []string{"nft", "iptables"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			before, err := s.Node.Snapshot(netns.Around{})
			if err != nil {
				t.Fatal(err)
			}
			s.start(t, diverting(mode))
			first := s.status(t).Generation
			old := s.agent
			if s.agent, err = s.AgentUnready(diverting(mode)...); err != nil {
				t.Fatal(err)
			}
			if err := netns.Poll(patience, func() error { return s.takenOver(t, first) }); err != nil {
				t.Fatal(err)
			}
			for _, h := range s.clients() {
				s.served(t, h, svc4)
			}
			if err := old.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := old.Wait(); err != nil {
				t.Errorf("the first agent ends with %v", err)
			}
			for _, h := range s.clients() {
				s.served(t, h, svc4)
				s.served(t, h, kas6)
			}
			// The operators' port is the second one's now.
			if err := netns.Poll(patience, s.operatorsReady); err != nil {
				t.Errorf("the operators' port: %v", err)
			}
			if err := s.agent.Signal(syscall.SIGTERM); err != nil {
				t.Fatal(err)
			}
			if err := s.agent.Wait(); err != nil {
				t.Errorf("the second agent ends with %v", err)
			}
			if err := s.Cleanup(); err != nil {
				t.Fatal(err)
			}
			after, err := s.Node.Snapshot(netns.Around{})
			if err != nil {
				t.Fatal(err)
			}
			for _, line := range before.Diff(after) {
				t.Errorf("left behind: %s", line)
			}
		})
	}
}

// takenOver is nil when another agent than the given one answers, and is ready.
func (s *scene) takenOver(t *testing.T, generation string) error {
	t.Helper()
	st := s.status(t)
	if st.Generation == generation || !st.Ready {
		return fmt.Errorf("agent %s answers, ready: %v %s", st.Generation, st.Ready, st.NotReady)
	}
	return nil
}

func (s *scene) operatorsReady() error {
	c := &http.Client{Transport: &http.Transport{DialContext: s.Node.Dial, DisableKeepAlives: true}}
	resp, err := c.Get("http://" + stack.AgentOperators + "/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s", resp.Status)
	}
	return nil
}
