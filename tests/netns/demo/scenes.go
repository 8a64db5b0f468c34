package main

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/kas"
	"github.com/kasway/kasway/tests/netns/stack"
)

const (
	kasPort     = 6443
	servicePort = 443
)

// demo is what the steps share.
type demo struct {
	ctx   context.Context
	bin   string
	start time.Time

	topo    *netns.Topology
	stack   *stack.Stack
	kas     *kas.Server
	fw      *netns.Firewall
	agent   *stack.Process
	before  netns.Snapshot
	watches []*kas.Watch
}

// plan has pod and service ranges that the control plane uses itself.
func plan() *netns.Plan {
	p := netns.DefaultPlan()
	p.Inside = []netip.Prefix{p.Routed4, p.Routed6, p.Bridge4, p.Bridge6}
	return &p
}

func (d *demo) clients() []*netns.Host {
	return []*netns.Host{d.topo.Node, d.topo.RoutedPods[0], d.topo.BridgedPods[0]}
}

// addresses are those by which clients know the KAS.
func addresses() []netip.AddrPort {
	return []netip.AddrPort{
		netip.AddrPortFrom(netns.ClusterIP4, servicePort), netip.AddrPortFrom(netns.ClusterIP6, servicePort),
		netip.AddrPortFrom(netns.KAS4, kasPort), netip.AddrPortFrom(netns.KAS6, kasPort),
	}
}

func (d *demo) buildTopology() (string, error) {
	var err error
	d.topo, err = netns.Build(netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true, Masquerade: true, Plan: plan()})
	if err != nil {
		return "", err
	}
	d.kas, err = kas.New(kas.Config{
		Names:     []string{"kubernetes.default.svc"},
		Addresses: []netip.Addr{netns.KAS4, netns.KAS6, netns.ClusterIP4, netns.ClusterIP6},
		Interval:  100 * time.Millisecond,
	})
	if err != nil {
		return "", err
	}
	for _, a := range []netip.Addr{netns.KAS4, netns.KAS6} {
		l, err := d.topo.ControlPlane.Listen("tcp", netip.AddrPortFrom(a, kasPort).String())
		if err != nil {
			return "", err
		}
		go func() { _ = d.kas.Serve(l) }() // until close
	}
	d.before, err = d.topo.Node.Snapshot(netns.Around{})
	return fmt.Sprintf("KAS at %s and %s", netns.KAS4, netns.KAS6), err
}

// reach asks for a TCP connection from a client, past Kasway.
func (d *demo) reach(h *netns.Host, to netip.AddrPort, timeout time.Duration) error {
	ctx, cancel := context.WithTimeout(d.ctx, timeout)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", to.String())
	if err != nil {
		return err
	}
	return c.Close()
}

func (d *demo) reachable() (string, error) {
	for _, h := range d.clients() {
		for _, a := range addresses()[2:] {
			if err := d.reach(h, a, 3*time.Second); err != nil {
				return "", fmt.Errorf("%s -> %s: %w", h.Label, a, err)
			}
		}
	}
	return "6 of 6 connects", nil
}

func (d *demo) shut() (string, error) {
	var err error
	if d.fw, err = d.topo.ControlPlane.FirewallHere(stack.Port); err != nil {
		return "", err
	}
	return fmt.Sprintf("port %d stays open", stack.Port), nil
}

func (d *demo) unreachable() (string, error) {
	results := make(chan error, 6)
	for _, h := range d.clients() {
		for _, a := range addresses()[2:] {
			go func() {
				if err := d.reach(h, a, time.Second); err == nil {
					results <- fmt.Errorf("%s still reaches %s", h.Label, a)
					return
				}
				results <- nil
			}()
		}
	}
	var err error
	for range 6 {
		err = errors.Join(err, <-results)
	}
	in, _, ferr := d.fw.Drops()
	return fmt.Sprintf("6 of 6 time out, %d packets dropped", in), errors.Join(err, ferr)
}

func (d *demo) startServer() (string, error) {
	dir, err := stack.TempDir()
	if err != nil {
		return "", err
	}
	bin, err := filepath.Abs(d.bin)
	if err != nil {
		return "", err
	}
	if d.stack, err = stack.New(d.topo, bin, dir); err != nil {
		return "", err
	}
	_, err = d.stack.Server(netip.AddrPortFrom(netns.KAS4, kasPort).String())
	return fmt.Sprintf("--allowed-destination %s:%d", netns.KAS4, kasPort), err
}

func (d *demo) startAgent() (string, error) {
	var list []string
	for _, a := range addresses() {
		list = append(list, a.String())
	}
	var err error
	d.agent, err = d.stack.Agent("--clients", "host,pods", "--target", "kas="+strings.Join(list, ","))
	if err != nil {
		return "", err
	}
	text, err := d.stack.Run("status", "--admin-socket", d.agent.Socket)
	for line := range strings.Lines(text) {
		if rest, ok := strings.CutPrefix(line, "Mode"); ok {
			return "mode " + strings.TrimSpace(rest), err
		}
	}
	return "", errors.Join(err, errors.New("status does not tell the mode"))
}

func (d *demo) client(h *netns.Host, to netip.AddrPort) (*kas.Client, error) {
	return kas.NewClient("https://"+to.String(), d.kas.CA(), h.Dial, true)
}

func (d *demo) versions() (string, error) {
	n := 0
	for _, h := range d.clients() {
		for _, a := range addresses() {
			c, err := d.client(h, a)
			if err != nil {
				return "", err
			}
			ctx, cancel := context.WithTimeout(d.ctx, 5*time.Second)
			_, err = c.Version(ctx)
			cancel()
			c.Close()
			if err != nil {
				return "", fmt.Errorf("%s -> %s: %w", h.Label, a, err)
			}
			n++
		}
	}
	return fmt.Sprintf("%d of %d: 3 clients, ClusterIP and KAS address", n, n), nil
}

func (d *demo) curl() (string, error) {
	ca := filepath.Join(d.stack.Dir, "kas-ca.pem")
	if err := os.WriteFile(ca, d.kas.CA(), 0o600); err != nil {
		return "", err
	}
	url := fmt.Sprintf("https://%s/version", netns.ClusterIP4)
	_, err := d.topo.Node.Run("curl", "-sS", "-m", "5", "--cacert", ca, url)
	return "curl --cacert ca.pem " + url, err
}

func (d *demo) holdWatches() (string, error) {
	for _, h := range d.clients() {
		c, err := d.client(h, addresses()[0])
		if err != nil {
			return "", err
		}
		w, err := c.Watch(d.ctx, "")
		if err != nil {
			return "", fmt.Errorf("%s: %w", h.Label, err)
		}
		d.watches = append(d.watches, w)
		for range 3 {
			if _, err := w.Next(); err != nil {
				return "", fmt.Errorf("%s: %w", h.Label, err)
			}
		}
	}
	return fmt.Sprintf("%d watches, 3 events each so far", len(d.watches)), nil
}

func (d *demo) rules() (string, error) {
	text, err := d.stack.Run("rules", "--running", "--admin-socket", d.agent.Socket)
	if err != nil {
		return "", err
	}
	fmt.Println()
	for line := range strings.Lines(text) {
		fmt.Print("    | ", line)
	}
	fmt.Println()
	return fmt.Sprintf("%d lines", strings.Count(text, "\n")), nil
}

// kill shows that watches are reset, and that connects are refused at once
// instead of running into the firewall.
func (d *demo) kill() (string, error) {
	if err := d.agent.Signal(syscall.SIGKILL); err != nil {
		return "", err
	}
	_ = d.agent.Wait() // tells the signal
	killed := time.Now()
	for i, w := range d.watches {
		var err error
		for err == nil {
			_, err = w.Next()
		}
		_ = w.Close()
		if !errors.Is(err, syscall.ECONNRESET) {
			return "", fmt.Errorf("watch %d ends with %w, not with a reset", i, err)
		}
	}
	var longest time.Duration
	for _, h := range d.clients() {
		for _, a := range addresses() {
			begun := time.Now()
			err := d.reach(h, a, 5*time.Second)
			longest = max(longest, time.Since(begun))
			if !errors.Is(err, syscall.ECONNREFUSED) {
				return "", fmt.Errorf("%s -> %s: %w, not refused", h.Label, a, err)
			}
		}
	}
	return fmt.Sprintf("3 watches reset, 12 of 12 connects refused (longest %s), all within %s",
		longest.Round(time.Millisecond), time.Since(killed).Round(time.Millisecond)), nil
}

func (d *demo) cleanup() (string, error) {
	if err := d.agent.Signal(syscall.SIGTERM); err != nil {
		return "", err
	}
	if err := d.agent.Wait(); err != nil {
		return "", fmt.Errorf("the agent ends with %w\n%s", err, d.agent.Log())
	}
	for range 2 {
		if err := d.stack.Cleanup(); err != nil {
			return "", err
		}
	}
	after, err := d.topo.Node.Snapshot(netns.Around{})
	if err != nil {
		return "", err
	}
	if diff := d.before.Diff(after); len(diff) > 0 {
		return "", fmt.Errorf("left behind:\n%s", strings.Join(diff, "\n"))
	}
	return "rules, sets, addresses, routes, sysctls: equal", nil
}

// close ends what the steps have started, also after a failed one.
func (d *demo) close() error {
	var errs []error
	for _, w := range d.watches {
		_ = w.Close()
	}
	if d.kas != nil {
		errs = append(errs, d.kas.Close())
	}
	if d.topo != nil {
		errs = append(errs, d.topo.Close())
	}
	if d.stack != nil {
		errs = append(errs, os.RemoveAll(d.stack.Dir))
	}
	return errors.Join(errs...)
}
