package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
)

func statusCommand() *cobra.Command {
	var (
		socket string
		ready  bool
		out    cli.Output
	)
	c := &cobra.Command{
		Use:   "status",
		Short: "Show what the running agent diverts and carries",
		Long: `Shows what the running agent diverts and carries.

Where several run, as during an upgrade, that is the one of the container that
the command is executed in, or else the newest; the others are named.`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			own := observe.OwnSocket(socket)
			s, err := ask(c.Context(), own)
			if err != nil {
				return err
			}
			if ready {
				if !s.Ready {
					return errors.New("not ready: " + s.NotReady)
				}
				_, err := fmt.Fprintln(c.OutOrStdout(), "ready")
				return err
			}
			beside := others(c.Context(), socket, s.Generation)
			return out.Print(c.OutOrStdout(), s, func(w io.Writer) { printStatus(w, s, beside, time.Now()) })
		},
	}
	out.Register(c)
	c.Flags().StringVar(&socket, "admin-socket", config.AgentDefaults().Observe.AdminSocket, "the `path` of the agent's admin socket")
	c.Flags().BoolVar(&ready, "ready", false, "only tell whether it is ready: exit 0 or 1, for probes")
	return c
}

// others are the agents that run beside the one with this generation, as before
// and after an upgrade.
func others(ctx context.Context, socket, generation string) (all []agent.Status) {
	for _, at := range observe.Sockets(socket) {
		// One that has just ended is not beside us any more.
		if s, err := ask(ctx, at); err == nil && s.Generation != generation {
			all = append(all, s)
		}
	}
	return all
}

// progress says what an agent does, and how far it has come with that.
func progress(s agent.Status) string {
	if s.Drain != nil && (s.Phase == agent.PhaseDraining || s.Phase == agent.PhaseDrained) {
		return s.Phase + ", " + s.Drain.String()
	}
	return s.Phase
}

func printStatus(w io.Writer, s agent.Status, beside []agent.Status, now time.Time) {
	state := "ready"
	if !s.Ready {
		state = "not ready: " + s.NotReady
	}
	_, _ = fmt.Fprintf(w, "Agent\t%s, up %s, %s\n", s.Version, ago(now, s.Started), state)
	for _, o := range beside {
		_, _ = fmt.Fprintf(w, "Beside\t%s, up %s, generation %s: %s\n", o.Version, ago(now, o.Started), o.Generation, progress(o))
	}
	_, _ = fmt.Fprintf(w, "Mode\t%s, when down: %s\n", orNone(s.Mode), s.WhenDown)
	for _, d := range s.Detail {
		_, _ = fmt.Fprintf(w, "\t%s\n", oneLine(d))
	}
	for _, k := range s.Skipped {
		_, _ = fmt.Fprintf(w, "\tnot %s: %s\n", k.Mode, oneLine(k.Reason))
	}
	_, _ = fmt.Fprintf(w, "\nTARGET\tSTATE\tCONNECTIONS\tADDRESSES\n")
	for _, t := range s.Targets {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", t.Name, t.State, countsText(t.Connections), orNone(strings.Join(t.Addresses, " ")))
	}
	_, _ = fmt.Fprintf(w, "\nSERVER\tLINK\tSINCE\tRTT\tSTREAMS\tVERSION\tLAST ERROR\n")
	for _, l := range s.Links {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%d\t%s\t%s\n", l.Server, l.State, ago(now, l.Since),
			rtt(l.RTT), l.Streams, orNone(l.Version), orNone(oneLine(l.LastError)))
	}
}

func rtt(d time.Duration) string {
	if d == 0 {
		return "-"
	}
	return d.Round(10 * time.Microsecond).String()
}

func ago(now, then time.Time) string {
	if then.IsZero() {
		return "-"
	}
	return now.Sub(then).Round(time.Second).String()
}

func orNone(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
