package cli

import (
	"bytes"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
)

func TestNearestFlag(t *testing.T) {
	fs := pflag.NewFlagSet("x", pflag.ContinueOnError)
	for _, name := range []string{"cert", "allowed-destination", "listen", "upstream"} {
		fs.String(name, "", "")
	}
	for typed, want := range map[string]string{
		"cret": "cert", "allowed-destintaion": "allowed-destination", "lissten": "listen", "upstreams": "upstream",
		"frobnicate": "", "x": "", strings.Repeat("listen", 50): "",
	} {
		if got := nearestFlag(fs, typed); got != want {
			t.Errorf("--%s means %q, want %q", typed, got, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, OK},
		{errors.New("no"), Failed},
		{ErrShown, Failed},
		{UsageErrorf("wrong"), Usage},
		{&config.Error{}, Usage},
		{fmt.Errorf("x: %w", intercept.ErrPrivilege), Privilege},
	} {
		var stderr bytes.Buffer
		root := Group(&cobra.Command{Use: "k"})
		root.AddCommand(&cobra.Command{Use: "run", Args: NoArgs, RunE: func(*cobra.Command, []string) error { return c.err }})
		if got := Run(t.Context(), root, []string{"run"}, &bytes.Buffer{}, &stderr); got != c.want {
			t.Errorf("%v exits %d, want %d", c.err, got, c.want)
		}
		shown := c.err != nil && !errors.Is(c.err, ErrShown)
		if (stderr.Len() > 0) != shown {
			t.Errorf("%v shows %q", c.err, stderr.String())
		}
	}
}

func TestUsageErrors(t *testing.T) {
	for args, want := range map[string]string{
		"runn":       `unknown command "runn", did you mean run?`,
		"run x":      `unexpected argument "x"`,
		"run --cret": "did you mean --cert?",
	} {
		var stderr bytes.Buffer
		root := Group(&cobra.Command{Use: "k"})
		run := &cobra.Command{Use: "run", Args: NoArgs, RunE: func(*cobra.Command, []string) error { return nil }}
		run.Flags().String("cert", "", "")
		root.AddCommand(run)
		if got := Run(t.Context(), root, strings.Fields(args), &bytes.Buffer{}, &stderr); got != Usage || !strings.Contains(stderr.String(), want) {
			t.Errorf("%q exits %d and says %q, want %q", args, got, stderr.String(), want)
		}
	}
}
