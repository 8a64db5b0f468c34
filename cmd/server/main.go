// Command kasway-server runs beside the kube-apiserver: it lets agents in and
// dials for them what the policy allows.
package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/server"
)

const binary = "kasway-server"

func main() { os.Exit(cli.Main(root(), os.Args[1:], os.Stdout, os.Stderr)) }

func root() *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   binary,
		Short: "The kube-apiserver's side of the way to it",
		Long: `kasway-server lets agents in by their certificates and dials, for them, the
kube-apiservers (KAS) and other destinations that its policy allows. It stands
where it can reach the KAS; nodes need to reach only its port.`,
	})
	c.AddCommand(runCommand(), certsCommand(), cli.Version(binary))
	return c
}

// exit gives an error the exit code that the contract asks for.
func exit(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, server.ErrConfig):
		return cli.UsageErrorf("%w", err)
	case errors.Is(err, fs.ErrPermission):
		return fmt.Errorf("%w: %w", intercept.ErrPrivilege, err)
	}
	return err
}
