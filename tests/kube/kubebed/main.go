// Kubebed brings a test cluster up for use by hand, and down.
//
//	go run ./tests/kube/kubebed up [-proxy nftables] [-form staticpod] [-nodes 2] [-bootstrap] [-dual]
//	go run ./tests/kube/kubebed kubectl get pods -A
//	go run ./tests/kube/kubebed on node1 kasway-agent status
//	go run ./tests/kube/kubebed down
//
// Logs, certificates and configurations are in the folder that up prints. down
// also removes what a run that crashed has left.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "kubebed:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	if len(args) == 0 {
		return fmt.Errorf("usage: kubebed up [FLAG...] | kubectl ARG... | on NODE COMMAND... | down")
	}
	switch args[0] {
	case "up":
		return up(args[1:])
	case "kubectl":
		return kubectl(args[1:])
	case "on":
		return on(args[1:])
	case "down":
		unlock, err := bed.Lock()
		if err != nil {
			return err
		}
		defer unlock()
		return bed.Down()
	}
	return fmt.Errorf("unknown command %q (up, kubectl, on, down)", args[0])
}

func up(args []string) error {
	c := bed.Config{}
	fl := flag.NewFlagSet("up", flag.ExitOnError)
	fl.StringVar(&c.Proxy, "proxy", "iptables", "kube-proxy's mode: iptables, nftables")
	fl.StringVar(&c.Form, "form", bed.FormProcess, "how the agent runs: process, staticpod, daemonset")
	fl.StringVar(&c.Mode, "mode", "nft", "the agent's intercept.mode")
	fl.BoolVar(&c.Bootstrap, "bootstrap", false, "let the kubelet join with a token")
	fl.BoolVar(&c.DualStack, "dual", false, "IPv6 as well")
	fl.IntVar(&c.Nodes, "nodes", 1, fmt.Sprintf("how many, %d at most", bed.MaxNodes))
	_ = fl.Parse(args) // it exits by itself
	if c.Nodes < 1 || c.Nodes > bed.MaxNodes {
		return fmt.Errorf("a bed has 1 to %d nodes", bed.MaxNodes)
	}
	unlock, err := bed.Lock()
	if err != nil {
		return err
	}
	defer unlock()
	bin, err := bed.Build(context.Background())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Minute)
	defer cancel()
	b := bed.New(c, bin)
	steps := []func(context.Context) error{b.Up, b.StartServer, b.StartAgent, b.StartNode, b.StartWorkload}
	if c.Form == bed.FormDaemonSet {
		steps = append(steps, func(ctx context.Context) error { return b.AgentAnswers(ctx, "/readyz", 200) }, b.CloseDirect)
	}
	for _, step := range steps {
		if err := step(ctx); err != nil {
			return err
		}
	}
	fmt.Printf("%s is up in %s\n", strings.ReplaceAll(c.Name(), "-", ", "), bed.Dir())
	return nil
}

func kubectl(args []string) error {
	bin, err := bed.Build(context.Background())
	if err != nil {
		return err
	}
	cmd := bed.New(bed.Config{}, bin).Kubectl(context.Background(), os.Stdin, args...)
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	return cmd.Run()
}

// on runs a command as a host process of a node.
func on(args []string) error {
	if len(args) < 2 {
		return fmt.Errorf("usage: kubebed on NODE COMMAND [ARGUMENT]")
	}
	bin, err := bed.Build(context.Background())
	if err != nil {
		return err
	}
	n, err := bed.New(bed.Config{Nodes: bed.MaxNodes}, bin).Found(args[0])
	if err != nil {
		return err
	}
	if argv := args[1:]; argv[0] == bed.Agent {
		argv[0] = bin.Agent
	}
	out, err := n.Run(context.Background(), args[1:]...)
	fmt.Print(out)
	return err
}
