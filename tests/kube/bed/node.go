package bed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"
)

// Node is one node of a bed. It has namespaces of its own (network, mounts in
// which the machine's folders are hidden behind empty ones, processes, host
// name), and control groups named as systemd names them, all below one group.
type Node struct {
	Name string // in the cluster
	bed  *Bed
	init int // the node's first process, once it has booted
	address
}

func nodeName(i int) string { return fmt.Sprintf("node%d", i+1) }

func (n *Node) netns() string { return prefix + "-" + n.Name }

// User is who the node's kubelet is in the audit log.
func (n *Node) User() string { return "system:node:" + n.Name }

// Process is the name of one of the node's processes, for Running, Kill and
// Tail: kubelet, kube-proxy, containerd, Agent, or what Start was given.
func (n *Node) Process(name string) string { return n.named(name) }

// named tells this node's process, log or file from another node's.
func (n *Node) named(name string) string { return name + "-" + n.Name }

// Path is a file or folder of the node.
func (n *Node) Path(elem ...string) string {
	return n.bed.Path(append([]string{n.Name}, elem...)...)
}

func (n *Node) kubeletAddresses() []string {
	return n.bed.families(net.JoinHostPort(n.v4, kubeletPort), net.JoinHostPort(n.v6, kubeletPort))
}

// The units of a node's own processes.
const (
	unitAgent = "system.slice/kasway-agent.service"
	unitInit  = "init.scope"
	// unitTests is that of who plays a host process.
	unitTests = "system.slice/tests.service"
)

// boot is the process that keeps a node: it starts the node's first one, and
// takes that along when it ends.
const boot = "boot"

// bootNodes makes what the processes of each node find: groups and namespaces.
func (b *Bed) bootNodes(ctx context.Context) error {
	for _, n := range b.Nodes {
		if err := n.boot(ctx); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}

func (n *Node) boot(ctx context.Context) error {
	for _, d := range []string{"images", "manifests", "cni", "etc", "containerd", "kubelet", "pods", "sys"} {
		if err := os.MkdirAll(n.Path(d), 0o755); err != nil {
			return err
		}
	}
	if err := cgroupsUp(n.group()); err != nil {
		return err
	}
	if err := n.install("node-boot.sh", "boot.sh"); err != nil {
		return err
	}
	err := n.bed.start(n.named(boot), place{netns: n.netns(), cgroup: n.unit(unitInit)}, n.env(),
		"unshare", "--mount", "--uts", "--pid", "--fork", "--mount-proc", "--kill-child=KILL", "--propagation", "private",
		"bash", n.Path("boot.sh"))
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	return poll(ctx, 5*time.Millisecond, func() error {
		if _, err := os.Stat(n.Path("booted")); err != nil {
			return errors.Join(err, n.bed.Running(n.named(boot)))
		}
		n.init, err = child(n.bed.ours[n.named(boot)].pid)
		return err
	})
}

// Found is the node of that name in a bed that another run has brought up.
func (b *Bed) Found(name string) (*Node, error) {
	for _, n := range b.Nodes {
		if n.Name != name {
			continue
		}
		text, err := os.ReadFile(b.Path("pid", n.named(boot)))
		if err != nil {
			return nil, fmt.Errorf("%s is not up: %w", name, err)
		}
		var pid int
		if _, err := fmt.Sscan(string(text), &pid); err != nil {
			return nil, err
		}
		if n.init, err = child(pid); err != nil {
			return nil, fmt.Errorf("%s is not up: %w", name, err)
		}
		return n, nil
	}
	return nil, fmt.Errorf("there is no node %q", name)
}

// env is what the node's scripts are handed.
func (n *Node) env() []string {
	return []string{
		"N=" + n.Path(), "L=" + n.bed.Path("log"), "PKI=" + n.bed.Path("pki"), "NAME=" + n.Name,
		"GROUP=" + n.Cgroup(), "HYPERKUBE=" + n.bed.bin.Hyperkube,
	}
}

// place is where a unit of the node runs. The node has booted.
func (n *Node) place(unit string) place {
	return place{netns: n.netns(), cgroup: n.unit(unit), like: n.init}
}

// StartNode starts containerd, the kubelet and kube-proxy on every node, and
// does not wait for them.
func (b *Bed) StartNode(ctx context.Context) error {
	if b.Bootstrap {
		if err := b.apply(ctx, "bootstrap.yaml"); err != nil {
			return err
		}
	}
	for _, n := range b.Nodes {
		if err := n.startKubernetes(); err != nil {
			return fmt.Errorf("%s: %w", n.Name, err)
		}
	}
	return nil
}

func (n *Node) startKubernetes() error {
	for name, to := range map[string]string{
		"kubelet.yaml": "kubelet.yaml", "kube-proxy.yaml": "kube-proxy.yaml", "containerd.toml": "containerd.toml",
		"cni.conflist": "cni/10-bridge.conflist", "node-start.sh": "start.sh",
	} {
		if err := n.install(name, to); err != nil {
			return err
		}
	}
	if err := writeImage(boxImage, n.bed.bin.Box, n.Path("images/box.tar")); err != nil {
		return err
	}
	flags := "--kubeconfig=" + n.bed.Path("pki", n.named("kubelet")+".kubeconfig")
	if n.bed.Bootstrap {
		flags = "--bootstrap-kubeconfig=" + n.bed.Path("pki/bootstrap.kubeconfig") +
			" --kubeconfig=/var/lib/kubelet/kubeconfig --cert-dir=/var/lib/kubelet/pki"
	}
	env := append(n.env(), "NODE_IP="+strings.Join(n.bed.families(n.v4, n.v6), ","), "KUBECONFIG_FLAGS="+flags)
	return n.bed.start(n.named("start"), n.place(unitInit), env, "bash", n.Path("start.sh"))
}

// Run runs a host process of the node to its end: in its namespaces, and in a
// control group of the node's own processes, so that whatever is attached to the
// node's group sees it too.
func (n *Node) Run(ctx context.Context, argv ...string) (string, error) {
	cmd, release, err := n.place(unitTests).command(ctx, argv...)
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

// Start starts one in the background; its output is the log of Process(name).
func (n *Node) Start(name string, argv ...string) error {
	return n.bed.start(n.named(name), n.place(unitTests), nil, argv...)
}
