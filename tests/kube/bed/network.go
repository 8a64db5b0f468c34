package bed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
)

// run runs a command to its end; its output is part of the error.
func run(ctx context.Context, argv ...string) (string, error) {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return string(out), fmt.Errorf("%s: %w: %s", strings.Join(argv, " "), err, strings.TrimSpace(string(out)))
	}
	return string(out), nil
}

// networkUp makes the namespaces and cables them. A node has its default route
// through the control plane (the kubelet wants one), which forwards nothing, and
// routes to the other nodes' pods.
func (b *Bed) networkUp(ctx context.Context) error {
	for _, ns := range []string{nsWire, nsCP} {
		if err := batch(ctx, "", "netns add "+ns); err != nil {
			return err
		}
	}
	if err := batch(ctx, nsWire, "link add br0 type bridge mcast_snooping 0", "link set br0 up", "link set lo up"); err != nil {
		return err
	}
	if err := sysctl(ctx, nsWire, "net.bridge.bridge-nf-call-iptables=0", "net.bridge.bridge-nf-call-ip6tables=0"); err != nil {
		return err
	}
	if err := b.plugIn(ctx, nsCP, "cp0", address{v4: cp4, v6: cp6}); err != nil {
		return err
	}
	for _, n := range b.Nodes {
		if err := batch(ctx, "", "netns add "+n.netns()); err != nil {
			return err
		}
		if err := b.plugIn(ctx, n.netns(), n.Name, n.address); err != nil {
			return err
		}
		if err := batch(ctx, n.netns(), n.routes()...); err != nil {
			return err
		}
		if err := sysctl(ctx, n.netns(), b.families("net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")...); err != nil {
			return err
		}
	}
	return nil
}

// plugIn gives a namespace its device on the wire.
func (b *Bed) plugIn(ctx context.Context, ns, dev string, at address) error {
	err := batch(ctx, nsWire, "link add p-"+dev+" type veth peer name "+dev+" netns "+ns, "link set p-"+dev+" master br0 up")
	if err != nil {
		return err
	}
	lines := []string{"link set lo up", "link set " + dev + " up"}
	return batch(ctx, ns, append(lines, b.families("addr add "+at.v4+"/24 dev "+dev, "addr add "+at.v6+"/64 dev "+dev+" nodad")...)...)
}

// routes are those of a node's namespace.
func (n *Node) routes() []string {
	lines := n.bed.families("route add default via "+cp4, "route add default via "+cp6)
	for _, other := range n.bed.Nodes {
		if other != n {
			lines = append(lines, n.bed.families("route add "+other.pods4+" via "+other.v4, "route add "+other.pods6+" via "+other.v6)...)
		}
	}
	return lines
}

// batch runs ip's commands, one line each, in a namespace ("": the machine's).
func batch(ctx context.Context, ns string, lines ...string) error {
	argv := []string{"ip", "-batch", "-"}
	if ns != "" {
		argv = []string{"ip", "-n", ns, "-batch", "-"}
	}
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = strings.NewReader(strings.Join(lines, "\n") + "\n")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("ip in %q: %w: %s", ns, err, strings.TrimSpace(string(out)))
	}
	return nil
}

func sysctl(ctx context.Context, ns string, settings ...string) error {
	_, err := run(ctx, place{netns: ns}.argv(append([]string{"sysctl", "-qw"}, settings...))...)
	return err
}

// namespaces are all that a bed may have.
func namespaces() []string {
	all := []string{nsCP, nsWire}
	for i := range MaxNodes {
		all = append(all, prefix+"-"+nodeName(i))
	}
	return all
}

// networkDown removes the namespaces, and with them all that is in them.
func networkDown() error {
	var errs []error
	for _, ns := range namespaces() {
		if _, err := os.Stat("/run/netns/" + ns); err == nil {
			_, err := run(context.Background(), "ip", "netns", "del", ns)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
