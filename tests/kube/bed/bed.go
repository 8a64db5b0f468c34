// Package bed is a real Kubernetes in network namespaces: a control plane, one
// or two nodes, and between them a firewall that lets only Kasway's port through.
//
// Everything it makes has a name that begins with kasway-kube, so that Down
// finds it again after a crash: namespaces, control groups, and one directory
// with the certificates, logs, process ids and disks of the bed.
package bed

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"
)

// The ways the agent gets onto a node.
const (
	FormProcess   = "process"   // started before the kubelet, as by systemd
	FormStaticPod = "staticpod" // started by the kubelet, which then joins through it
	// FormDaemonSet is for nodes that reach the KAS some other way first: the
	// firewall lets them through until CloseDirect.
	FormDaemonSet = "daemonset"
)

// Config is what one bed looks like.
type Config struct {
	// Proxy is kube-proxy's mode: iptables or nftables.
	Proxy string
	// Form is how the agent runs: FormProcess, FormStaticPod or FormDaemonSet.
	Form string
	// Mode is the agent's intercept.mode.
	Mode string
	// Bootstrap lets the kubelet join with a token and a certificate signing
	// request; without it the kubelet has its certificate from the start.
	Bootstrap bool
	// DualStack gives nodes, pods and services IPv6 addresses as well, and the
	// KAS an IPv6 address and ClusterIP of its own.
	DualStack bool
	// Nodes is how many there are; 0 is 1.
	Nodes int
}

// Name says in a few words what c is.
func (c Config) Name() string {
	join, family := "kubeconfig", "ipv4"
	if c.Bootstrap {
		join = "bootstrap"
	}
	if c.DualStack {
		family = "dual"
	}
	name := fmt.Sprintf("%s-%s-%s-%s-%s", c.Proxy, c.Form, c.Mode, join, family)
	if c.Nodes > 1 {
		name += fmt.Sprintf("-%dnodes", c.Nodes)
	}
	return name
}

// Binaries are the paths of what runs in a bed. The programs must be static.
type Binaries struct {
	Hyperkube string // every Kubernetes component, see ../hyperkube
	Agent     string // kasway-agent
	Server    string // kasway-server
	Box       string // the pods' program, see ../box
	Deploy    string // the folder of the manifests
}

// Bed is one cluster. Its methods may be called by one goroutine at a time,
// but for API, whose result is safe for concurrent use.
type Bed struct {
	Config
	// Nodes are the bed's, node1 first.
	Nodes []*Node

	bin  Binaries
	dir  string
	ours map[string]*process // processes that this Bed started
	api  *API
}

// Dir is where the bed that this machine can have at a time keeps its state.
// It is short: paths of UNIX sockets end at 107 bytes.
func Dir() string { return filepath.Join(os.TempDir(), "kasway-kube") }

// New describes a bed; nothing is started. The caller holds the Lock.
func New(c Config, bin Binaries) *Bed {
	b := &Bed{Config: c, bin: bin, dir: Dir(), ours: map[string]*process{}}
	for i := range max(c.Nodes, 1) {
		b.Nodes = append(b.Nodes, &Node{Name: nodeName(i), bed: b, address: nodeAddresses[i]})
	}
	return b
}

// Path is a file or folder of the bed.
func (b *Bed) Path(elem ...string) string {
	return filepath.Join(append([]string{b.dir}, elem...)...)
}

// Up brings up everything but what runs on the nodes and Kasway: what an earlier
// run may have left is removed, then come network, nodes, certificates, control
// plane and firewall. The probes of the firewall are made here: each is seen to
// succeed before the firewall is on, and to fail after.
func (b *Bed) Up(ctx context.Context) error {
	if err := Down(); err != nil {
		return fmt.Errorf("removing what an earlier run left: %w", err)
	}
	for _, d := range []string{"log", "pid", "pki"} {
		if err := os.MkdirAll(b.Path(d), 0o755); err != nil {
			return err
		}
	}
	for _, step := range []struct {
		name string
		do   func(context.Context) error
	}{
		{"network", b.networkUp},
		{"nodes", b.bootNodes},
		{"certificates", b.certificates},
		{"control plane", b.controlPlaneUp},
		{"firewall", b.firewallUp},
	} {
		if err := step.do(ctx); err != nil {
			return fmt.Errorf("%s: %w", step.name, err)
		}
	}
	return nil
}

// Down ends and removes every trace of a bed, whoever made it. It may be
// called any number of times.
func Down() error {
	dir := Dir()
	return errors.Join(stopAll(dir), networkDown(), cgroupsDown(), os.RemoveAll(dir))
}

// poll calls f until it succeeds or ctx ends; the error is then f's last.
func poll(ctx context.Context, every time.Duration, f func() error) error {
	for {
		err := f()
		if err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(every):
		}
	}
}

// Poll calls f every 100 ms until it succeeds or the time is over; the error is
// then f's last.
func Poll(ctx context.Context, limit time.Duration, f func() error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return poll(ctx, 100*time.Millisecond, f)
}
