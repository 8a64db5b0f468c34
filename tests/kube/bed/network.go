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

// networkUp makes the namespaces and cables them. The node has its default
// route through the control plane (the kubelet wants one), which forwards
// nothing.
func (b *Bed) networkUp(ctx context.Context) error {
	for _, ns := range []string{nsWire, nsCP, nsNode} {
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
	for _, end := range []struct{ ns, dev, v4, v6 string }{
		{nsCP, "cp0", cp4, cp6}, {nsNode, "node0", node4, node6},
	} {
		err := batch(ctx, nsWire, "link add p-"+end.dev+" type veth peer name "+end.dev+" netns "+end.ns,
			"link set p-"+end.dev+" master br0 up")
		if err == nil {
			err = batch(ctx, end.ns, "link set lo up", "link set "+end.dev+" up", "addr add "+end.v4+"/24 dev "+end.dev)
		}
		if err == nil && b.DualStack {
			err = batch(ctx, end.ns, "addr add "+end.v6+"/64 dev "+end.dev+" nodad")
		}
		if err != nil {
			return err
		}
	}
	if err := batch(ctx, nsNode, "route add default via "+cp4); err != nil {
		return err
	}
	if !b.DualStack {
		return sysctl(ctx, nsNode, "net.ipv4.ip_forward=1")
	}
	if err := batch(ctx, nsNode, "route add default via "+cp6); err != nil {
		return err
	}
	return sysctl(ctx, nsNode, "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1")
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

// networkDown removes the namespaces, and with them all that is in them.
func networkDown() error {
	var errs []error
	for _, ns := range []string{nsNode, nsCP, nsWire} {
		if _, err := os.Stat("/run/netns/" + ns); err == nil {
			_, err := run(context.Background(), "ip", "netns", "del", ns)
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}
