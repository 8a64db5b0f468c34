package stories

import (
	"net"
	"testing"

	"github.com/kasway/kasway/tests/netns"
)

// With every place taken one more connection is reset at once, the last ones
// are kept for the host, and when connections end new ones are served.
func TestOverload(t *testing.T) {
	t.Parallel()
	const most, reserve = 16, 2
	s := newScene(t, netns.Spec{RoutedPods: 1})
	s.start(t, diverting("nft", "--max-connections", "16"))
	far := accepts(t, s.ControlPlane, raw4)
	same := s.steady(t)
	const limit = `kasway_agent_intercept_refused_total{reason="limit"}`
	was, from := metric(t, s.agent, limit), len(s.agent.Log())

	var open []net.Conn
	fill := func(h *netns.Host, n int) {
		for range n {
			client, server := pair(t, h, raw4, far)
			open = append(open, client, server)
		}
	}
	pod := s.RoutedPods[0]
	fill(pod, most-reserve)
	for range 3 {
		isCut(t, "one pod's connection too many", pod, raw4)
	}
	fill(s.Node, reserve)
	isCut(t, "one host's connection too many", s.Node, raw4)
	rises(t, s.agent, limit, was, 4)
	logged(t, s.agent, from, "connection refused", "limit")
	if n := metric(t, s.agent, "kasway_agent_intercept_connections"); n != most {
		t.Errorf("%v connections are counted, want %d", n, most)
	}
	// Those that were there have noticed nothing.
	for i := 0; i < len(open); i += 2 {
		greet(t, open[i], "still")
		hear(t, open[i+1], "still")
	}
	for _, c := range open {
		c.Close()
	}
	s.servedAgain(t, pod, svc4)
	same()
}
