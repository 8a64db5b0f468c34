package bed

import (
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// The names of Kasway's processes, for Running, Kill and Tail: that of an agent
// is Node.Process(Agent).
const (
	Server = "kasway-server"
	Agent  = "kasway-agent"
)

// everyNode is the certificate that all nodes of a DaemonSet share.
const everyNode = "nodes"

// kaswayCertificates makes those of server and agents as an operator would, in
// authority/, and copies to each node's folder what its agent has.
func (b *Bed) kaswayCertificates(ctx context.Context) error {
	if _, err := os.Stat(b.Path("authority")); err == nil {
		return nil
	}
	commands := [][]string{{"init"}, {"server", "--ip", cp4}, {"agent", "--name", everyNode}}
	for _, n := range b.Nodes {
		commands = append(commands, []string{"agent", "--name", n.Name})
	}
	for _, args := range commands {
		if _, err := run(ctx, append([]string{b.bin.Server, "certs"}, append(args, "--dir", b.Path("authority"))...)...); err != nil {
			return err
		}
	}
	for _, n := range b.Nodes {
		for from, to := range map[string]string{"agent-" + n.Name + ".crt": "agent.crt", "agent-" + n.Name + ".key": "agent.key", "ca.crt": "ca.crt"} {
			text, err := os.ReadFile(b.Path("authority", from))
			if err != nil {
				return err
			}
			if err := os.WriteFile(n.Path("etc", to), text, 0o600); err != nil {
				return err
			}
		}
	}
	return nil
}

// StartServer starts Kasway's server beside the KAS and waits until it accepts
// connections. The only thing that it may reach is the KAS.
func (b *Bed) StartServer(ctx context.Context) error {
	if err := b.kaswayCertificates(ctx); err != nil {
		return err
	}
	if err := b.start(Server, place{netns: nsCP}, nil, b.bin.Server, "run",
		"--listen", net.JoinHostPort(cp4, kaswayPort), "--allowed-destination", net.JoinHostPort(cp4, kasPort),
		"--cert", b.Path("authority/server.crt"), "--key", b.Path("authority/server.key"), "--ca", b.Path("authority/ca.crt"),
		"--admin-socket", b.Path("server.sock"), "--log-level", "debug"); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, 5*time.Millisecond, func() error {
		if err := b.Running(Server); err != nil {
			return err
		}
		c, err := dialIn(ctx, nsCP, "tcp", net.JoinHostPort(cp4, kaswayPort))
		if err == nil {
			c.Close()
		}
		return err
	})
}

// StartAgent starts the agent on every node, or, where the kubelet does that,
// puts the manifest and the image where it finds them.
func (b *Bed) StartAgent(ctx context.Context) error {
	if err := b.kaswayCertificates(ctx); err != nil {
		return err
	}
	if b.Form == FormDaemonSet {
		return b.daemonSet(ctx)
	}
	for _, n := range b.Nodes {
		if err := n.StartAgent(ctx); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}

// StartAgent starts the agent on one node, as a process or a static pod.
func (n *Node) StartAgent(context.Context) error {
	if err := n.install("agent.yaml", "etc/agent.yaml"); err != nil {
		return err
	}
	if n.bed.Form == FormStaticPod {
		return n.staticPod()
	}
	return n.agentProcess(n.named(Agent))
}

func (n *Node) agentProcess(name string) error {
	return n.bed.start(name, n.place(unitAgent), nil, n.bed.bin.Agent, "run", "--config", n.Path("etc/agent.yaml"))
}

// Ask runs a command of kasway-agent on the node, such as status, whatever form
// the agent has.
func (n *Node) Ask(ctx context.Context, args ...string) (string, error) {
	return n.Run(ctx, append([]string{n.bed.bin.Agent}, args...)...)
}

// AgentStatus is the answer of the agent's operator port to path.
func (n *Node) AgentStatus(ctx context.Context, path string) (code int, text string, err error) {
	client := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialIn(ctx, n.netns(), network, addr)
		},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://"+agentOperator+path, nil)
	if err != nil {
		return 0, "", err
	}
	resp, err := client.Do(req)
	if err != nil {
		return 0, "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return resp.StatusCode, string(body), err
}

// AgentAnswers waits until every agent's operator port answers path with code.
func (b *Bed) AgentAnswers(ctx context.Context, path string, code int) error {
	for _, n := range b.Nodes {
		err := Poll(ctx, time.Minute, func() error {
			got, text, err := n.AgentStatus(ctx, path)
			if err == nil && got != code {
				err = fmt.Errorf("the agent of %s answers %s with %d: %s", n.Name, path, got, text)
			}
			return err
		})
		if err != nil {
			return err
		}
	}
	return nil
}
