package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
)

// unknown is shown where it cannot be told who a client is.
const unknown = "unknown"

func connsCommand() *cobra.Command {
	var (
		socket, target, workload string
		out                      cli.Output
	)
	c := &cobra.Command{
		Use:   "conns",
		Short: "Show who talks to the KAS now",
		Long: `Lists the connections that the running agent carries, by target and by who made
them. During an upgrade those of the agent before, which it still serves for its
grace, are among them, as draining.

WORKLOAD is a systemd unit, a container, a pod (by its uid) or a cgroup, UID the
user and PROCESS the process, by its pid on the host. A client of which the agent
could not find that out is unknown: of pods only mode ebpf knows more than the
address. DIALLED is the address that the client meant. SENT went from the client
to the target, RECEIVED came back; no byte has passed for QUIET.`,
		Example: `  kasway-agent conns
  kasway-agent conns --workload kubelet.service
  kasway-agent conns -o json | jq '.[] | select(.quietNanoseconds > 60e9) | .podUID'`,
		Args: cli.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			all, err := everyConn(c.Context(), socket)
			if err != nil {
				return err
			}
			all = slices.DeleteFunc(all, func(s agent.ConnStatus) bool {
				return target != "" && s.Target != target || workload != "" && !strings.Contains(s.Workload, workload)
			})
			sortConns(all)
			return out.Print(c.OutOrStdout(), all, func(w io.Writer) { printConns(w, all, time.Now()) })
		},
	}
	out.Register(c)
	c.Flags().StringVar(&socket, "admin-socket", config.AgentDefaults().Observe.AdminSocket, "the `path` of the agent's admin socket")
	c.Flags().StringVar(&target, "target", "", "only connections to the target of that `name`")
	c.Flags().StringVar(&workload, "workload", "", "only those whose workload contains this `text`")
	return c
}

// everyConn asks the agent behind socket, and those before it that still run.
func everyConn(ctx context.Context, socket string) ([]agent.ConnStatus, error) {
	all := []agent.ConnStatus{}
	var errs []error
	asked := observe.Sockets(socket)
	for _, s := range asked {
		var some []agent.ConnStatus
		if err := askFor(ctx, s, "/conns", &some); err != nil {
			errs = append(errs, err)
			continue
		}
		all = append(all, some...)
	}
	if len(errs) < len(asked) {
		return all, nil // another one has just ended, or is too old to say
	}
	return nil, errors.Join(errs...)
}

// sortConns puts those of one client beside each other, the oldest first; the
// unknown ones come last.
func sortConns(all []agent.ConnStatus) {
	slices.SortStableFunc(all, func(a, b agent.ConnStatus) int {
		known := func(s agent.ConnStatus) int {
			if s.Workload == "" {
				return 1
			}
			return 0
		}
		return cmp.Or(cmp.Compare(a.Target, b.Target), cmp.Compare(known(a), known(b)),
			cmp.Compare(a.Workload, b.Workload), a.Since.Compare(b.Since), a.Client.Compare(b.Client))
	})
}

func printConns(w io.Writer, all []agent.ConnStatus, now time.Time) {
	if len(all) == 0 {
		_, _ = fmt.Fprintln(w, "no connection is carried now")
		return
	}
	_, _ = fmt.Fprintln(w, "TARGET\tSTATE\tAGE\tCLIENT\tWORKLOAD\tUID\tPROCESS\tDIALLED\tSENT\tRECEIVED\tQUIET")
	for _, s := range all {
		state := string(s.State)
		if s.Draining {
			state = "draining"
		}
		dialled := unknown
		if s.Original.IsValid() {
			dialled = s.Original.String()
		}
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\t%s\n",
			s.Target, state, brief(now.Sub(s.Since)), observe.Text(s.Client.String()), workloadText(s), uidText(s), processText(s), dialled,
			size(s.Sent), size(s.Received), brief(s.Quiet))
	}
}

// Widths of what clients choose themselves, in characters.
const (
	maxWorkload = 48 // "pod" and a uid fit
	maxProcess  = 32
)

func workloadText(s agent.ConnStatus) string {
	switch {
	case s.PodUID != "":
		return narrow("pod "+observe.Text(s.PodUID), maxWorkload) // the container is for -o json
	case s.Workload != "":
		return narrow(observe.Text(s.Workload), maxWorkload)
	case s.Pod:
		return unknown + " pod"
	}
	return unknown
}

func uidText(s agent.ConnStatus) string {
	if s.UID == nil {
		return unknown
	}
	return strconv.FormatUint(uint64(*s.UID), 10)
}

// processText is the command line if it is known, else what the process called
// itself when it connected.
func processText(s agent.ConnStatus) string {
	if s.PID == 0 {
		return unknown
	}
	what := cmp.Or(s.CommandLine, s.Command)
	return strings.TrimSpace(fmt.Sprintf("%d %s", s.PID, narrow(observe.Text(what), maxProcess)))
}

// narrow cuts out of the middle: both ends of a path say most.
func narrow(s string, most int) string {
	r := []rune(s)
	if len(r) <= most {
		return s
	}
	front := (most - 1) / 2
	return string(r[:front]) + "…" + string(r[len(r)-(most-1-front):])
}

// brief is a duration to the second, without noughts at its end: "1h2m".
func brief(d time.Duration) string {
	s := d.Round(time.Second).String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// size is a number of bytes as people read it: "0", "512", "1.5K", "20M".
func size(n uint64) string {
	const step = 1024
	if n < step {
		return strconv.FormatUint(n, 10)
	}
	f, unit := float64(n)/step, 0
	const units = "KMGTPE"
	for f >= step-0.5 && unit < len(units)-1 { // 1023.5 would be shown as 1024
		f /= step
		unit++
	}
	if f < 9.95 {
		return fmt.Sprintf("%.1f%c", f, units[unit])
	}
	return fmt.Sprintf("%.0f%c", f, units[unit])
}

// countsText says how many connections a target has: "3 open, 1 held".
func countsText(n agent.ConnCounts) string {
	var parts []string
	for _, p := range []struct {
		n    int
		what string
	}{{n.Open, "open"}, {n.Dialling, "dialling"}, {n.Held, "held"}} {
		if p.n > 0 {
			parts = append(parts, fmt.Sprintf("%d %s", p.n, p.what))
		}
	}
	return cmp.Or(strings.Join(parts, ", "), "0")
}
