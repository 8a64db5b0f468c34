// Package cli is what both commands have in common: exit codes, version, tables
// and JSON.
package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
)

// Exit codes of every command.
const (
	OK        = 0
	Failed    = 1  // it failed, or a need is not met
	Usage     = 2  // wrong flags or configuration
	Privilege = 77 // the process may not do what it must
)

// usageError is one of flags and arguments.
type usageError struct{ error }

func (e usageError) Unwrap() error { return e.error }

// UsageErrorf makes an error that exits with Usage.
func UsageErrorf(format string, a ...any) error { return usageError{fmt.Errorf(format, a...)} }

// ErrShown is an error whose text was shown already.
var ErrShown = errors.New("failed")

// Main runs root with args until it ends or the process is told to stop, and
// returns the exit code. The first SIGINT or SIGTERM ends the command's context,
// the second one the process.
func Main(root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)
	return Run(ctx, root, args, stdout, stderr)
}

// Run is Main without signals.
func Run(ctx context.Context, root *cobra.Command, args []string, stdout, stderr io.Writer) int {
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SilenceErrors, root.SilenceUsage = true, true
	suggestFlags(root)
	err := root.ExecuteContext(ctx)
	if err == nil {
		return OK
	}
	if !errors.Is(err, ErrShown) {
		_, _ = fmt.Fprintf(stderr, "%s: %v\n", root.Name(), err)
	}
	return code(err)
}

func code(err error) int {
	var (
		usage usageError
		cfg   *config.Error
	)
	switch {
	case errors.Is(err, intercept.ErrPrivilege):
		return Privilege
	case errors.As(err, &usage), errors.As(err, &cfg):
		return Usage
	}
	return Failed
}

// Group makes a command that only holds others. It fails for a word that is
// none of them, with the nearest ones.
func Group(c *cobra.Command) *cobra.Command {
	c.Args = cobra.ArbitraryArgs
	c.RunE = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return c.Help()
		}
		text := fmt.Sprintf("unknown command %q", args[0])
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			text += ", did you mean " + strings.Join(near, " or ") + "?"
		}
		return UsageErrorf("%s\nSee '%s --help'", text, c.CommandPath())
	}
	c.SuggestionsMinimumDistance = 2
	return c
}

// NoArgs is cobra.NoArgs with the exit code of a usage error.
func NoArgs(c *cobra.Command, args []string) error {
	if len(args) > 0 {
		return UsageErrorf("unexpected argument %q\nSee '%s --help'", args[0], c.CommandPath())
	}
	return nil
}

// Output is the -o flag of commands that print something.
type Output struct{ format string }

// Register adds the flag to c.
func (o *Output) Register(c *cobra.Command) {
	c.Flags().StringVarP(&o.format, "output", "o", "table", "`format` of the output: table or json")
}

// Print writes v as JSON, or lets table write what people read.
func (o *Output) Print(w io.Writer, v any, table func(w io.Writer)) error {
	switch o.format {
	case "json":
		e := json.NewEncoder(w)
		e.SetIndent("", "  ")
		return e.Encode(v)
	case "table":
		t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
		table(t)
		return t.Flush()
	}
	return UsageErrorf("--output %q: allowed are table and json", o.format)
}

// Version is the version command.
func Version(binary string) *cobra.Command {
	var out Output
	c := &cobra.Command{
		Use: "version", Short: "Show which version this is", Args: NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			b := observe.Build()
			return out.Print(c.OutOrStdout(), b, func(w io.Writer) {
				_, _ = fmt.Fprintf(w, "%s %s\n", binary, b.Version)
				_, _ = fmt.Fprintf(w, "commit %s, %s, %s/%s\n", b.Commit, b.Go, b.OS, b.Arch)
			})
		},
	}
	out.Register(c)
	return c
}
