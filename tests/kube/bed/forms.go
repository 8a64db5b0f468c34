package bed

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"path/filepath"
)

// namespace is that of deploy/daemonset.
const namespace = "kasway"

// kustomization is the name of such a file.
const kustomization = "kustomization.yaml"

// overlayValues are what the overlay is filled in with.
type overlayValues struct {
	values
	Base   string // the kustomization that is shipped
	Groups string // the folder of the nodes' control groups
}

func (b *Bed) overlay(base string) overlayValues {
	return overlayValues{b.values(), base, filepath.Join(cgroup2(), prefix)}
}

// staticPod gives the node the manifest that is shipped, with two changes: the
// image is one that the node has, and the folder of the configuration, which
// would be the machine's, is the node's.
func (n *Node) staticPod() error {
	if err := n.agentImage(); err != nil {
		return err
	}
	manifest := filepath.Join(n.bed.bin.Deploy, "staticpod/kasway-agent.yaml")
	text, err := os.ReadFile(manifest)
	if err != nil {
		return err
	}
	for from, to := range map[string]string{
		"image: kasway-agent:latest":    "image: " + agentImage,
		"hostPath: {path: /etc/kasway,": "hostPath: {path: " + n.Path("etc") + ",",
	} {
		if !bytes.Contains(text, []byte(from)) {
			return fmt.Errorf("%s does not say %q", manifest, from)
		}
		text = bytes.ReplaceAll(text, []byte(from), []byte(to))
	}
	return os.WriteFile(n.Path("manifests/kasway-agent.yaml"), text, 0o644)
}

func (n *Node) agentImage() error {
	return writeImage(agentImage, n.bed.bin.Agent, n.Path("images/agent.tar"))
}

// daemonSet applies the kustomization that is shipped, as its comment says, from
// an overlay of the bed's own; and lets nodes reach the KAS as such nodes must be
// able to.
func (b *Bed) daemonSet(ctx context.Context) error {
	if err := b.OpenDirect(ctx); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := n.agentImage(); err != nil {
			return err
		}
	}
	dir := b.Path("overlay")
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	// The folder of a kustomization is named by a path that is relative.
	base, err := filepath.Rel(dir, filepath.Join(b.bin.Deploy, "daemonset"))
	if err != nil {
		return err
	}
	for _, name := range []string{"agent.yaml", kustomization} {
		text, err := render(name, b.overlay(base))
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
			return err
		}
	}
	for _, args := range [][]string{
		{"create", "namespace", namespace},
		{"-n", namespace, "create", "secret", "generic", Agent,
			"--from-file=tls.crt=" + b.Path("authority/agent-"+everyNode+".crt"),
			"--from-file=tls.key=" + b.Path("authority/agent-"+everyNode+".key"),
			"--from-file=ca.crt=" + b.Path("authority/ca.crt")},
		{"apply", "-k", dir},
	} {
		if out, err := b.Kubectl(ctx, nil, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %s: %w: %s", args, err, out)
		}
	}
	return nil
}

// RollAgent restarts the DaemonSet's pods, one after the other, and waits until
// the last one is ready and its predecessor gone.
func (b *Bed) RollAgent(ctx context.Context) error {
	for _, args := range [][]string{
		{"rollout", "restart"}, {"rollout", "status", "--timeout=90s"},
	} {
		args = append([]string{"-n", namespace}, append(args, "daemonset/"+Agent)...)
		if out, err := b.Kubectl(ctx, nil, args...).CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %s: %w: %s", args, err, out)
		}
	}
	return nil
}

// DeleteAgent deletes the DaemonSet, and does not wait for what nodes that have
// lost their way cannot confirm.
func (b *Bed) DeleteAgent(ctx context.Context) error {
	out, err := b.Kubectl(ctx, nil, "-n", namespace, "delete", "--wait=false", "daemonset/"+Agent).CombinedOutput()
	if err != nil {
		return fmt.Errorf("kubectl delete: %w: %s", err, out)
	}
	return nil
}
