package bed

import (
	"bytes"
	"context"
	"fmt"
	"strings"
)

// StartNode starts containerd, the kubelet and kube-proxy on the node, and does
// not wait for it: see NodeReady.
func (b *Bed) StartNode(ctx context.Context) error {
	for name, to := range map[string]string{
		"kubelet.yaml": "kubelet.yaml", "kube-proxy.yaml": "kube-proxy.yaml", "containerd.toml": "containerd.toml",
		"cni.conflist": "cni/10-bridge.conflist", "node-init.sh": "init.sh",
	} {
		if err := b.install(name, "node", to); err != nil {
			return err
		}
	}
	if err := writeImage(boxImage, b.bin.Box, b.Path("node/images/box.tar")); err != nil {
		return err
	}
	if err := cgroupsUp(); err != nil {
		return err
	}
	flags := "--kubeconfig=" + b.Path("pki/kubelet.kubeconfig")
	if b.Bootstrap {
		if err := b.apply(ctx, "bootstrap.yaml"); err != nil {
			return err
		}
		flags = "--bootstrap-kubeconfig=" + b.Path("pki/bootstrap.kubeconfig") +
			" --kubeconfig=/var/lib/kubelet/kubeconfig --cert-dir=/var/lib/kubelet/pki"
	}
	env := []string{
		"DIR=" + b.dir, "PKI=" + b.Path("pki"), "HYPERKUBE=" + b.bin.Hyperkube, "NAME=" + NodeName,
		"NODE_IP=" + strings.Join(b.families(node4, node6), ","), "KUBECONFIG_FLAGS=" + flags,
	}
	// The network namespace comes first, then those of the node's own. If this
	// process is killed, --kill-child ends the node's init and all below it.
	return b.start("node", place{netns: nsNode, cgroup: hostGroup}, env,
		"unshare", "--mount", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "--propagation", "private",
		"bash", b.Path("node/init.sh"))
}

// StartWorkload creates the pods of files/workload.yaml, and does not wait for
// them: see PodsRunning.
func (b *Bed) StartWorkload(ctx context.Context) error { return b.apply(ctx, "workload.yaml") }

func (b *Bed) apply(ctx context.Context, name string) error {
	text, err := b.render(name)
	if err != nil {
		return err
	}
	if out, err := b.Kubectl(ctx, bytes.NewReader(text), "apply", "-f", "-").CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply -f %s: %w: %s", name, err, out)
	}
	return nil
}

// HostRun runs a host process of the node to its end: in its network namespace,
// and in the control group of the node's own processes, so that whatever is
// attached to the node's group sees it too.
func (b *Bed) HostRun(ctx context.Context, argv ...string) (string, error) {
	cmd, release, err := place{netns: nsNode, cgroup: hostGroup}.command(ctx, argv...)
	if err != nil {
		return "", err
	}
	defer release()
	out, err := cmd.CombinedOutput()
	if err != nil {
		err = fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), err
}

// StartHostProcess starts one in the background; its output is log/NAME.log.
func (b *Bed) StartHostProcess(name string, argv ...string) error {
	return b.start(name, place{netns: nsNode, cgroup: hostGroup}, nil, argv...)
}
