package main

import (
	"errors"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
)

func cleanupCommand() *cobra.Command {
	var (
		stateDir, socket string
		force            bool
	)
	c := &cobra.Command{
		Use:   "cleanup",
		Short: "Remove everything an agent has ever installed on this node",
		Long: `Removes rules, sets, addresses, state and the admin socket, of every generation
and mode, and with them the guard that refuses connects while no agent lives. It
needs neither a configuration nor the tunnel, and may be run any number of times.`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			running, err := intercept.Others("")
			if err != nil {
				return err
			}
			if len(running) > 0 && !force {
				return fmt.Errorf("an agent is running here (generation %s): stop it first, or say --force", strings.Join(running, ", "))
			}
			var errs []error
			for _, m := range everyMode() {
				if err := m.Cleanup(c.Context()); err != nil {
					errs = append(errs, fmt.Errorf("mode %s: %w", m.Name, err))
				}
			}
			if err := intercept.CleanupAddresses(stateDir); err != nil {
				errs = append(errs, err)
			}
			if len(running) == 0 {
				if err := observe.RemoveStale(socket); err != nil {
					errs = append(errs, err)
				}
			}
			if err := errors.Join(errs...); err != nil {
				return err
			}
			_, err = fmt.Fprintln(c.OutOrStdout(), "nothing of Kasway is left on this node")
			return err
		},
	}
	defaults := config.AgentDefaults()
	c.Flags().StringVar(&stateDir, "state-dir", defaults.Intercept.StateDir, "the `directory` that the agent was given")
	c.Flags().StringVar(&socket, "admin-socket", defaults.Observe.AdminSocket, "the `path` of the agent's admin socket")
	c.Flags().BoolVar(&force, "force", false, "even though an agent is running, which puts back what it needs")
	return c
}
