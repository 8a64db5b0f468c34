package tunnel

import (
	"net"
	"testing"

	"golang.org/x/net/nettest"
)

// Both faces of a stream are net.Conns, over a real link.
func TestConn_Nettest(t *testing.T) {
	for name, swap := range map[string]bool{"agent_to_server": false, "server_to_agent": true} {
		t.Run(name, func(t *testing.T) {
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				agent, server, stop := connPair(t)
				if swap {
					return server, agent, stop, nil
				}
				return agent, server, stop, nil
			})
		})
	}
}
