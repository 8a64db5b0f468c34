// Command kasway-agent runs on every node: it takes the connections that are
// meant for the kube-apiserver and carries them to a kasway-server.
package main

import (
	"os"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
)

const binary = "kasway-agent"

func main() { os.Exit(cli.Main(root(), os.Args[1:], os.Stdout, os.Stderr)) }

func root() *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   binary,
		Short: "The node's way to the kube-apiserver",
		Long: `kasway-agent takes the TCP connections of kubelet, kube-proxy, host processes and
pods that are meant for the kube-apiserver (KAS), without any change to them, and
carries them over one gRPC link to a kasway-server beside the KAS.`,
	})
	c.AddCommand(runCommand(), checkCommand(), rulesCommand(), statusCommand(), connsCommand(), cleanupCommand(), cli.Version(binary))
	return c
}
