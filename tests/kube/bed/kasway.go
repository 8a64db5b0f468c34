package bed

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// The names of Kasway's processes, for Running, Kill and Tail.
const (
	Server = "kasway-server"
	Agent  = "kasway-agent"
)

// kaswayCertificates makes those of server and agent as an operator would, in
// authority/, and copies to the node's folder what an agent has.
func (b *Bed) kaswayCertificates(ctx context.Context) error {
	if _, err := os.Stat(b.Path("authority")); err == nil {
		return nil
	}
	for _, args := range [][]string{{"init"}, {"server", "--ip", cp4}, {"agent", "--name", NodeName}} {
		if _, err := run(ctx, append([]string{b.bin.Server, "certs"}, append(args, "--dir", b.Path("authority"))...)...); err != nil {
			return err
		}
	}
	for from, to := range map[string]string{"agent-" + NodeName + ".crt": "agent.crt", "agent-" + NodeName + ".key": "agent.key", "ca.crt": "ca.crt"} {
		text, err := os.ReadFile(b.Path("authority", from))
		if err != nil {
			return err
		}
		if err := os.WriteFile(b.Path("kasway", to), text, 0o600); err != nil {
			return err
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

// StartAgent starts the agent on the node, or, where the kubelet does that,
// puts the pod's manifest and image where it finds them.
func (b *Bed) StartAgent(ctx context.Context) error {
	if err := b.kaswayCertificates(ctx); err != nil {
		return err
	}
	if err := b.install("agent.yaml", "kasway/agent.yaml"); err != nil {
		return err
	}
	if b.Form == FormStaticPod {
		return b.staticPod()
	}
	return b.start(Agent, place{netns: nsNode, cgroup: agentGroup}, nil, b.bin.Agent, "run", "--config", b.Path("kasway/agent.yaml"))
}

// staticPod gives the node the manifest that is shipped, with two changes: the
// image is one that the node has, and the folder of the configuration, which
// would be the machine's, is the bed's.
func (b *Bed) staticPod() error {
	if err := writeImage(agentImage, b.bin.Agent, b.Path("node/images/agent.tar")); err != nil {
		return err
	}
	text, err := os.ReadFile(b.bin.StaticPod)
	if err != nil {
		return err
	}
	for from, to := range map[string]string{
		"image: kasway-agent:latest":    "image: " + agentImage,
		"hostPath: {path: /etc/kasway,": "hostPath: {path: " + b.Path("kasway") + ",",
	} {
		if !bytes.Contains(text, []byte(from)) {
			return fmt.Errorf("%s does not say %q", b.bin.StaticPod, from)
		}
		text = bytes.ReplaceAll(text, []byte(from), []byte(to))
	}
	return os.WriteFile(b.Path("node/manifests/kasway-agent.yaml"), text, 0o644)
}

// AgentStatus is the answer of the agent's operator port to path.
func (b *Bed) AgentStatus(ctx context.Context, path string) (code int, text string, err error) {
	client := http.Client{Timeout: 3 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialIn(ctx, nsNode, network, addr)
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

// AgentAnswers waits until the agent's operator port answers path with code.
func (b *Bed) AgentAnswers(ctx context.Context, path string, code int) error {
	return Poll(ctx, time.Minute, func() error {
		got, text, err := b.AgentStatus(ctx, path)
		if err == nil && got != code {
			err = fmt.Errorf("the agent answers %s with %d: %s", path, got, text)
		}
		return err
	})
}
