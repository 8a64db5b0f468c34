package main

import (
	"context"
	"errors"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/cgroupbpf"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/intercept/iptables"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/intercept/tproxy"
	"github.com/kasway/kasway/pkg/rules"
)

// maker is how one mode is made, and what it needs of its listeners.
type maker struct {
	make    func(log logrus.FieldLogger) (intercept.Mode, error)
	cleanup func(ctx context.Context) error
	open    func(s *rules.State, d *rules.Divert) ([]intercepttest.Listener, error)
}

func makers(cgroup string) map[string]maker {
	return map[string]maker{
		"ebpf": {
			make: func(log logrus.FieldLogger) (intercept.Mode, error) {
				return cgroupbpf.New(cgroupbpf.Config{Cgroup: cgroup, Log: log}), nil
			},
			cleanup: cgroupbpf.Cleanup, open: openListeners,
		},
		"nft": {
			make: func(log logrus.FieldLogger) (intercept.Mode, error) {
				return nft.New(nft.Config{Log: log}), nil
			},
			cleanup: nft.Cleanup, open: openListeners,
		},
		"iptables": {
			make: func(log logrus.FieldLogger) (intercept.Mode, error) {
				return iptables.New(iptables.Config{Log: log}), nil
			},
			cleanup: iptables.Cleanup, open: openListeners,
		},
		"tproxy": {
			make: func(log logrus.FieldLogger) (intercept.Mode, error) {
				return tproxy.New(tproxy.Config{Clients: rules.Clients{Host: true, Pods: true}, Log: log}), nil
			},
			cleanup: func(ctx context.Context) error { return errors.Join(nft.Cleanup(ctx), tproxy.Cleanup(ctx)) },
			open:    openTransparent,
		},
	}
}
