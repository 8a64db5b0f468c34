package main

import (
	"os"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
)

func runCommand() *cobra.Command {
	c := &cobra.Command{
		Use:   "run",
		Short: "Divert and carry until told to stop",
		Long: `Diverts the node's connections to the configured targets and carries them.

On SIGTERM the agent stops diverting and ends what it carries. With whenDown
refuse, connects are then refused until the next agent takes over, or until
'kasway-agent cleanup'. A second signal ends it at once.

An agent that starts beside another one takes over from it: it proves itself,
the other one stops diverting, serves what it holds for --grace, and resets the
rest over --grace-spread; told to stop meanwhile, it ends after that. On SIGHUP
an agent starts the one that takes over from it, with the same arguments, and
goes on if that cannot.`,
		Example: `  kasway-agent run -f /etc/kasway/agent.yaml
  kasway-agent run --target kas=10.96.0.1:443,172.30.0.10:6443 --clients host,pods \
    --server kasway.example.com:8091 --cert agent.crt --key agent.key --ca ca.crt`,
		Args: cli.NoArgs,
	}
	flags := configFlags(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := config.LoadAgent(flags)
		if err != nil {
			return err
		}
		if err := config.CheckCredentials(cfg.Identity); err != nil {
			return err
		}
		log, err := observe.NewLogger(c.ErrOrStderr(), cfg.Observe.LogLevel, cfg.Observe.LogFormat)
		if err != nil {
			return cli.UsageErrorf("%w", err)
		}
		wired, err := wire(cfg, log)
		if err != nil {
			return cli.UsageErrorf("%w", err)
		}
		// Who reads the log must not be able to stop the agent.
		patient := observe.NewPatient(c.ErrOrStderr(), wired.Registry)
		log.SetOutput(patient)
		defer patient.Close(time.Second)
		log.WithField("version", observe.Version).Info("kasway-agent starts")
		var stop func()
		wired.Reload, wired.Spawn, stop = reloads()
		defer stop()
		wired.Manager, wired.Succeeds = manager(log), os.Getenv(successorEnv) != ""
		if err := agent.Run(c.Context(), wired); err != nil {
			return err
		}
		log.Info("kasway-agent has stopped")
		return nil
	}
	return c
}
