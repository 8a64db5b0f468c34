package main

import (
	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/config"
)

// configFlags gives c the flags of the configuration, shown in groups below
// those that are c's own.
func configFlags(c *cobra.Command, own ...string) *config.AgentOverrides {
	flags := config.AgentFlags(c.Flags())
	cli.GroupFlags(c,
		cli.FlagGroup{Title: "Flags of " + c.Name(), Flags: own},
		cli.FlagGroup{Title: "Configuration", Flags: []string{"config"}},
		cli.FlagGroup{Title: "What is diverted", Flags: []string{"target", "clients"}},
		cli.FlagGroup{Title: "How it is diverted", Flags: []string{
			"mode", "when-down", "when-unreachable", "hold", "grace", "grace-spread", "max-connections", "resolve-interval",
			"bind-address", "node-ipv4", "node-ipv6", "uplink", "cgroup", "state-dir",
		}},
		cli.FlagGroup{Title: "Links", Flags: []string{"server", "server-name"}},
		cli.FlagGroup{Title: "Identity", Flags: []string{"cert", "key", "ca", "node-name"}},
		cli.FlagGroup{Title: "Operators", Flags: []string{"observe-address", "admin-socket", "log-level", "log-format"}},
	)
	return flags
}
