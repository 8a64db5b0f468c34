package main

import (
	"net"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/server"
)

func runCommand() *cobra.Command { return newRun(nil) }

// newRun makes the run command; listening, for tests, is told the addresses.
func newRun(listening func(agents, operators net.Addr)) *cobra.Command {
	c := &cobra.Command{
		Use:   "run",
		Short: "Serve agents until told to stop",
		Long: `Lets agents in and dials for them what the policy allows: nothing, unless it is
named. On SIGTERM every link ends, and agents go on with their other servers.`,
		Example: `  kasway-server run -f /etc/kasway/server.yaml
  kasway-server run --cert server.crt --key server.key --ca ca.crt \
    --allowed-destination localhost:6443`,
		Args: cli.NoArgs,
	}
	flags := config.ServerFlags(c.Flags())
	cli.GroupFlags(c,
		cli.FlagGroup{Title: "Configuration", Flags: []string{"config"}},
		cli.FlagGroup{Title: "Agents", Flags: []string{"listen", "insecure-agents", "cert", "key", "ca"}},
		cli.FlagGroup{Title: "Policy", Flags: []string{"allowed-destination", "grant", "upstream"}},
		cli.FlagGroup{Title: "Operators", Flags: []string{"observe-address", "admin-socket", "log-level", "log-format"}},
	)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := config.LoadServer(flags)
		if err != nil {
			return err
		}
		log, err := observe.NewLogger(c.ErrOrStderr(), cfg.Observe.LogLevel, cfg.Observe.LogFormat)
		if err != nil {
			return cli.UsageErrorf("%w", err)
		}
		options, err := wire(cfg, log)
		if err != nil {
			return err
		}
		options.Listening = listening
		return exit(server.Run(c.Context(), options))
	}
	return c
}
