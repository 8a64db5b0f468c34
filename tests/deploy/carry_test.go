package deploy

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// known are the addresses of the KAS that the configuration beside the manifests
// means.
var known = []netip.AddrPort{clusterIP, kas4, kas6}

// deployed is a site whose agent and server run from their images as the
// manifests say, with the configurations that stand beside them.
type deployed struct {
	*site
	node  kubelet
	image imageRoot
	pod   pod
	agent *netns.Cmd
}

// deploy starts the server and makes everything ready for the agent of p.
func deploy(t *testing.T, p pod) *deployed {
	t.Helper()
	image, serverImage := imageOf(t, "kasway-agent"), imageOf(t, "kasway-server")
	s := newSite(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	serverKeys, agentKeys := s.credentials(t)
	controlPlane := kubelet{
		host: s.ControlPlane, dir: s.cp, hosts: s.hosts,
		secrets:    map[string]map[string][]byte{"kasway-server": serverKeys},
		configMaps: map[string]map[string][]byte{"kasway-server": {"server-config.yaml": read(t, "deploy", "server", "server-config.yaml")}},
	}
	server := workloadIn(t, "deploy", "server", "server.yaml").Template.Spec
	box, err := controlPlane.container(server, serverImage, nil)
	if err != nil {
		t.Fatal(err)
	}
	cmd, err := box.command(s.ControlPlane)
	if err != nil {
		t.Fatal(err)
	}
	s.start(t, "server", cmd)
	// Its readiness probe, with the port that the name stands for.
	probe := netns.Probe{From: s.ControlPlane, To: netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), uint16(server.Containers[0].Ports[0].ContainerPort))}
	if err := netns.Poll(patience, func() error { return probe.Reach(time.Second) }); err != nil {
		t.Fatal(err)
	}
	// Files for the static pod, which has no secrets.
	etc := filepath.Join(s.dir, "etc/kasway")
	if err := keys(etc, map[string][]byte{"agent.crt": agentKeys["tls.crt"], "ca.crt": agentKeys["ca.crt"], "agent.yaml": staticConfig(t)}, 0o644); err != nil {
		t.Fatal(err)
	}
	if err := keys(etc, map[string][]byte{"agent.key": agentKeys["tls.key"]}, 0o600); err != nil {
		t.Fatal(err)
	}
	return &deployed{site: s, image: image, pod: p, node: kubelet{
		host: s.Node, dir: s.dir, hosts: s.hosts,
		secrets:    map[string]map[string][]byte{"kasway-agent": agentKeys},
		configMaps: map[string]map[string][]byte{"kasway-agent": {"agent.yaml": read(t, "deploy", "daemonset", "agent.yaml")}},
	}}
}

// staticConfig is the DaemonSet's configuration with the paths that the static
// pod's file names.
func staticConfig(t *testing.T) []byte {
	t.Helper()
	text := string(read(t, "deploy", "daemonset", "agent.yaml"))
	for from, to := range map[string]string{"tls/tls.crt": "agent.crt", "tls/tls.key": "agent.key", "tls/ca.crt": "ca.crt"} {
		changed := strings.ReplaceAll(text, "/etc/kasway/"+from, "/etc/kasway/"+to)
		if changed == text {
			t.Fatalf("deploy/daemonset/agent.yaml does not name %s", from)
		}
		text = changed
	}
	return []byte(text)
}

func (d *deployed) startAgent(t *testing.T, flags ...string) {
	t.Helper()
	box, err := d.node.container(d.pod, d.image, nil, flags...)
	if err != nil {
		t.Fatal(err)
	}
	if d.agent, err = box.command(d.Node); err != nil {
		t.Fatal(err)
	}
	d.start(t, "agent", d.agent)
	if err := netns.Poll(patience, d.ready); err != nil {
		t.Fatalf("the agent does not become ready: %v", err)
	}
}

// ready is the manifest's readiness probe.
func (d *deployed) ready() error {
	code, out, err := d.exec(d.pod.Containers[0].ReadinessProbe.Exec.Command...)
	if err == nil && code != 0 {
		err = fmt.Errorf("exit %d: %s", code, out)
	}
	return err
}

// exec runs a command as in the agent's container.
func (d *deployed) exec(argv ...string) (code int, out string, err error) {
	box, err := d.node.container(d.pod, d.image, argv)
	if err != nil {
		return 0, "", err
	}
	cmd, err := box.command(d.Node)
	if err != nil {
		return 0, "", err
	}
	return stack.ExitOf(cmd)
}

// stop ends the agent as the kubelet does; it must end by itself.
func (d *deployed) stop(t *testing.T) {
	t.Helper()
	if err := d.agent.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := d.agent.Wait(); err != nil {
		t.Errorf("the agent, asked to stop: %v", err)
	}
}

// only takes every capability but those named from the manifest's.
func only(p pod, keep ...string) pod {
	c := p.Containers[0]
	c.SecurityContext.Capabilities.Add = keep
	p.Containers = []container{c}
	return p
}

// The agent runs from its image with exactly what the manifests allow it, and
// host and pods reach the KAS through the server that its own manifest runs. In
// mode iptables it looks after its rules, in either back end; after a cleanup
// nothing is left.
func TestImage_Carries(t *testing.T) {
	netns.Require(t)
	pods := agentPods(t)
	for name, c := range map[string]struct {
		pod   pod
		proxy netns.KubeProxy
		flags []string
		want  string // in the status
		log   string
	}{
		"iptables, nft back end":    {pods["DaemonSet"], netns.IptablesNFT, []string{"--mode", "iptables"}, "iptables", "back end nft"},
		"iptables, legacy back end": {pods["DaemonSet"], netns.IptablesLegacy, []string{"--mode", "iptables"}, "iptables", "back end legacy"},
		"nft with NET_ADMIN alone":  {only(pods["DaemonSet"], "NET_ADMIN"), netns.NoKubeProxy, []string{"--mode", "nft"}, "nft", ""},
		"static pod, auto":          {pods["static pod"], netns.NFTables, nil, "nft", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := deploy(t, c.pod)
			if err := d.Node.InstallKubeProxy(c.proxy, netns.Service{ClusterIP: clusterIP, Endpoint: kas4}); err != nil {
				t.Fatal(err)
			}
			// What the kubelet makes for volumes is not the agent's.
			if _, err := d.node.container(d.pod, d.image, nil); err != nil {
				t.Fatal(err)
			}
			around := netns.Around{Trees: []string{filepath.Join(d.dir, "var"), filepath.Join(d.dir, "run")}}
			before, err := d.Node.Snapshot(around)
			if err != nil {
				t.Fatal(err)
			}
			if err := d.nobody(patience / 40); err != nil {
				t.Fatal(err)
			}
			d.startAgent(t, c.flags...)
			if err := d.everybody(known...); err != nil {
				t.Error(err)
			}
			if code, out, err := d.exec("/kasway-agent", "status"); err != nil || code != 0 || !strings.Contains(out, "Mode") || !strings.Contains(out, c.want+",") {
				t.Errorf("status exits %d (%v), want mode %s:\n%s", code, err, c.want, out)
			}
			if !strings.Contains(d.logs["agent"].String(), c.log) {
				t.Errorf("the agent does not log %q", c.log)
			}
			if c.want == "iptables" {
				d.repairs(t, c.proxy)
			}
			d.stop(t)
			if strings.Contains(d.logs["agent"].String(), `"level":"error"`) {
				t.Error("the agent logs an error")
			}
			d.pod = pods["DaemonSet"] // cleaning up after every mode takes what every mode takes
			if code, out, err := d.exec("/kasway-agent", "cleanup"); err != nil || code != 0 {
				t.Errorf("cleanup exits %d (%v):\n%s", code, err, out)
			}
			d.unchanged(t, before, around)
		})
	}
}

// repairs removes the agent's jumps, as a kube-proxy that starts anew pushes
// them back, and waits until the agent has put them there again.
func (d *deployed) repairs(t *testing.T, proxy netns.KubeProxy) {
	t.Helper()
	for _, chain := range []string{"OUTPUT", "PREROUTING"} {
		if _, err := d.Node.Run(string(proxy), "-t", "nat", "-F", chain); err != nil {
			t.Fatal(err)
		}
	}
	err := netns.Poll(patience, func() error {
		if !strings.Contains(d.logs["agent"].String(), "putting it back") {
			return errors.New("the agent notices nothing")
		}
		return d.everybody(known...)
	})
	if err != nil {
		t.Errorf("the agent does not put its rules back: %v", err)
	}
}

// unchanged compares the node with what it was; kube-proxy's jumps, which a
// test may have removed, do not count.
func (d *deployed) unchanged(t *testing.T, before netns.Snapshot, around netns.Around) {
	t.Helper()
	after, err := d.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range before.Diff(after) {
		if !strings.Contains(line, "KUBE-SERVICES") {
			t.Errorf("after cleanup: %s", line)
		}
	}
	if _, err := os.Stat(filepath.Join(d.dir, "run/kasway/agent.sock")); err == nil {
		t.Error("the socket is left")
	}
}
