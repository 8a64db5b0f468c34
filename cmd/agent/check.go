package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
)

// finding is the answer to one question of check.
type finding struct {
	Need   string `json:"need"`
	State  string `json:"state"`
	Detail string `json:"detail,omitempty"`
	// Why is what depends on it, and Remedy what to do about it, if it is not ok.
	Why    string `json:"why,omitempty"`
	Remedy string `json:"remedy,omitempty"`
	// Notes are worth knowing, whatever the state is.
	Notes []string `json:"notes,omitempty"`

	privilege bool
}

// States of a finding. Only stateMissing fails the check.
const (
	stateOK      = "ok"
	stateMissing = "missing"
	stateUnknown = "unknown" // it could not be found out
	stateUnused  = "unused"  // it cannot be used, and need not be
	stateWarning = "warning"
	stateNote    = "note" // no need, but good to know
)

func checkCommand() *cobra.Command {
	var out cli.Output
	c := &cobra.Command{
		Use:   "check",
		Short: "Tell what an agent needs here, and how to get what is missing",
		Long: `Looks at the configuration, the credentials, this node's kernel and addresses, and
the way to the servers, and changes nothing. A state is ok, missing, warning,
unknown (it could not be found out), unused (a mode that cannot be used here,
where another one can) or note (nothing is asked for, but it is good to know).

Exit code 0: nothing is missing; 1: something is; 2: the configuration is wrong;
77: this process lacks a privilege.`,
		Example: `  kasway-agent check -f /etc/kasway/agent.yaml
  kasway-agent check -o json`,
		Args: cli.NoArgs,
	}
	out.Register(c)
	flags := configFlags(c, "output")
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := config.LoadAgent(flags)
		if err != nil {
			return err
		}
		found := check(c.Context(), cfg)
		if err := out.Print(c.OutOrStdout(), found, func(w io.Writer) { printFindings(w, found) }); err != nil {
			return err
		}
		return verdict(found)
	}
	return c
}

func printFindings(w io.Writer, found []finding) {
	_, _ = fmt.Fprintln(w, "NEED\tSTATE\tDETAIL")
	for i, f := range found {
		_, _ = fmt.Fprintf(w, "%s\t%s\t%s\n", f.Need, f.State, orNone(oneLine(f.detail())))
		for _, n := range f.Notes {
			_, _ = fmt.Fprintf(w, "\t\tnote: %s\n", oneLine(n))
		}
		// Said once for neighbours that have it in common.
		var next finding
		if i+1 < len(found) {
			next = found[i+1]
		}
		if f.Why != "" && next.Why != f.Why {
			_, _ = fmt.Fprintf(w, "\t\twhy: %s\n", oneLine(f.Why))
		}
		if f.Remedy != "" && next.Remedy != f.Remedy {
			_, _ = fmt.Fprintf(w, "\t\tremedy: %s\n", oneLine(f.Remedy))
		}
	}
}

// detail leaves out what the state says already.
func (f finding) detail() string {
	if f.State != stateMissing {
		return f.Detail
	}
	for _, s := range []error{intercept.ErrPrivilege, intercept.ErrNotSupported} {
		if rest, ok := strings.CutPrefix(f.Detail, s.Error()+": "); ok {
			return rest
		}
	}
	return f.Detail
}

// verdict is nil if nothing is missing.
func verdict(found []finding) error {
	var missing, denied []string
	for _, f := range found {
		switch {
		case f.State != stateMissing:
		case f.privilege:
			denied = append(denied, f.Need)
		default:
			missing = append(missing, f.Need)
		}
	}
	rest := strings.Join(missing, ", ")
	switch {
	case len(denied) == 0 && len(missing) == 0:
		return nil
	case len(denied) == 0:
		return fmt.Errorf("missing: %s", rest)
	case len(missing) == 0:
		return fmt.Errorf("%w: %s", intercept.ErrPrivilege, strings.Join(denied, ", "))
	}
	return fmt.Errorf("%w: %s; missing as well: %s", intercept.ErrPrivilege, strings.Join(denied, ", "), rest)
}

func oneLine(s string) string { return strings.Join(strings.Split(s, "\n"), "; ") }

// count is "1 target", "2 targets".
func count(n int, what string) string {
	if n == 1 {
		return "1 " + what
	}
	return fmt.Sprintf("%d %ss", n, what)
}
