package intercepttest

import (
	"context"
	"net"
	"sync/atomic"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/dial"
)

// guard is the agent's, in a holder that was given rules; else everybody is
// admitted.
var guard atomic.Pointer[dial.Func]

func guardWith(rules []access.ClientRule) {
	g := access.GuardClients(rules, logrus.StandardLogger(), nil,
		func(context.Context, dial.Target) (dial.Conn, error) { return nil, nil })
	guard.Store(&g)
}

// admitted asks the guard as the agent does for a connection that it has taken.
func admitted(c net.Conn, target, side string) bool {
	g := guard.Load()
	if g == nil {
		return true
	}
	_, err := (*g)(context.Background(), dial.Target{Name: target, Client: addrPort(c.RemoteAddr()), Pod: side == "pods"})
	return err == nil
}
