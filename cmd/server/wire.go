package main

import (
	"context"
	"net"
	"os"
	"syscall"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/server"
	"github.com/kasway/kasway/pkg/tunnel"
)

// wire puts the server's parts together.
func wire(cfg config.Server, log logrus.FieldLogger) (server.Options, error) {
	reg := observe.NewRegistry("server")
	host, err := os.Hostname()
	if err != nil {
		return server.Options{}, err
	}
	metrics := tunnel.NewServerMetrics(reg)
	return server.Options{
		Config:   cfg,
		Resolver: net.DefaultResolver,
		Dialer:   &net.Dialer{Control: markIfAllowed},
		Log:      log,
		Registry: reg,
		Explain:  intercept.ExplainListen,
		NewTunnel: func(c server.Carry) server.Tunnel {
			return tunnel.NewServer(tunnel.ServerConfig{
				TLS: c.TLS,
				Admit: func(ctx context.Context, p tunnel.Peer) (context.Context, error) {
					return c.Admit(ctx, p.Certificates)
				},
				Dial:             c.Dial,
				Upstreams:        c.Upstreams,
				UpstreamsChanged: c.Changed,
				ServerID:         host,
				Version:          observe.Version,
				Log:              log,
				Metrics:          metrics,
			})
		},
	}, nil
}

// markIfAllowed marks what the server dials as an agent's own sockets are, so
// that an agent on the same host does not divert it back to the server. Where
// the server may not set marks it has no agent beside it, or an upstream that
// the agent does not divert, such as a loopback address.
func markIfAllowed(network, address string, c syscall.RawConn) error {
	_ = intercept.NewOwnSockets(intercept.Mark, intercept.Mark).Control(network, address, c)
	return nil
}
