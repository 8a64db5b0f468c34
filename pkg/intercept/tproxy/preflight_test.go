package tproxy

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/vishvananda/netlink"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// preflightEnv makes the test binary print what Preflight says.
const preflightEnv = "KASWAY_TPROXY_TEST_PREFLIGHT"

const ipvsHeader = "IP Virtual Server version 1.2.1 (size=4096)\nProt LocalAddress:Port Scheduler Flags\n  -> RemoteAddress:Port Forward Weight ActiveConn InActConn\n"

// fakeNode is a node with these files below /proc and /sys, and these links.
func fakeNode(t *testing.T, files map[string]string, links ...netlink.Link) node {
	t.Helper()
	root := t.TempDir()
	for name, text := range files {
		path := filepath.Join(root, name)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, []byte(text), 0o644)); err != nil {
			t.Fatal(err)
		}
	}
	return node{proc: root + "/proc", sys: root + "/sys", tun: tunDevice, links: func() ([]netlink.Link, error) { return links, nil }}
}

func bridge(name string, index int) netlink.Link {
	return &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: name, Index: index}}
}

func port(of int) netlink.Link {
	return &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "veth0", Index: 99, MasterIndex: of}}
}

func TestObstacles(t *testing.T) {
	const nf4, nf6 = "proc/sys/net/bridge/bridge-nf-call-iptables", "proc/sys/net/bridge/bridge-nf-call-ip6tables"
	const ipvs = "proc/thread-self/net/ip_vs"
	onlyHost := rules.Clients{Host: true}
	for name, c := range map[string]struct {
		clients      rules.Clients
		files        map[string]string
		links        []netlink.Link
		what, remedy string // "": admitted
	}{
		"nothing":                {clients: everybody},
		"bridge-nf":              {everybody, map[string]string{nf4: "1\n"}, []netlink.Link{bridge("cni0", 3), port(3)}, "bridge cni0 has ports", "net.bridge.bridge-nf-call-iptables"},
		"bridge-nf of IPv6":      {everybody, map[string]string{nf4: "0\n", nf6: "1\n"}, []netlink.Link{bridge("cni0", 3), port(3)}, "bridge cni0", "net.bridge.bridge-nf-call-ip6tables"},
		"bridge's own":           {everybody, map[string]string{nf4: "0\n", "sys/class/net/cni1/bridge/nf_call_iptables": "1\n"}, []netlink.Link{bridge("cni0", 3), port(3), bridge("cni1", 4), port(4)}, "bridge cni1 has", "bridge-nf-call"},
		"bridge-nf, no bridge":   {clients: everybody, files: map[string]string{nf4: "1\n"}, links: []netlink.Link{port(0)}},
		"bridge-nf, empty":       {clients: everybody, files: map[string]string{nf4: "1\n"}, links: []netlink.Link{bridge("docker0", 3)}},
		"bridge-nf, only host":   {clients: onlyHost, files: map[string]string{nf4: "1\n"}, links: []netlink.Link{bridge("cni0", 3), port(3)}},
		"bridge without filters": {clients: everybody, files: map[string]string{nf4: "0\n", nf6: "0\n"}, links: []netlink.Link{bridge("cni0", 3), port(3)}},
		"ipvs":                   {onlyHost, map[string]string{ipvs: ipvsHeader + "TCP  0A600001:01BB rr  \n  -> AC1E000A:192B      Masq    1      0          0         \n"}, nil, "IPVS has virtual services (1, by /proc/net/ip_vs)", "--proxy-mode"},
		"ipvs loaded":            {clients: everybody, files: map[string]string{ipvs: ipvsHeader}},
		"reverse paths":          {clients: everybody, files: map[string]string{"proc/sys/net/ipv4/conf/all/rp_filter": "1\n", "proc/sys/net/ipv4/conf/all/src_valid_mark": "1\n"}},
	} {
		t.Run(name, func(t *testing.T) {
			m := New(Config{Clients: c.clients})
			m.rules, m.node = admits{}, fakeNode(t, c.files, c.links...)
			r := m.Preflight(t.Context())
			if c.what == "" {
				if r.Err != nil {
					t.Errorf("refused: %v", r.Err)
				}
				return
			}
			if !errors.Is(r.Err, intercept.ErrNotSupported) || !strings.Contains(r.Err.Error(), c.what) || !strings.Contains(r.Remedy, c.remedy) {
				t.Errorf("%v (%s), want %q (%q)", r.Err, r.Remedy, c.what, c.remedy)
			}
		})
	}
}

// admits is rules that any kernel can have, or none for err.
type admits struct {
	intercept.Mode
	err error
}

func (a admits) Preflight(context.Context) intercept.Report {
	return intercept.Report{Err: a.err, Remedy: "see the rules"}
}

func TestPreflightOfTheRestOfAKernel(t *testing.T) {
	m := New(Config{Clients: everybody})
	n := fakeNode(t, map[string]string{"dir/file": ""})
	for name, c := range map[string]struct {
		tun    string
		err    error
		want   error
		remedy string
	}{
		"all there":    {tunDevice, nil, nil, ""},
		"no device":    {n.proc + "/none", nil, intercept.ErrNotSupported, "/dev/net/tun"},
		"no privilege": {tunDevice, intercept.ErrPrivilege, intercept.ErrPrivilege, "see the rules"},
		"no modules":   {tunDevice, intercept.ErrNotSupported, intercept.ErrNotSupported, "nft_tproxy"},
		"not known":    {tunDevice, os.ErrDeadlineExceeded, os.ErrDeadlineExceeded, "see the rules"},
	} {
		m.rules, m.node = admits{err: c.err}, n
		m.node.tun = c.tun
		if r := m.Preflight(t.Context()); !errors.Is(r.Err, c.want) || c.want == nil && r.Err != nil || !strings.Contains(r.Remedy, c.remedy) {
			t.Errorf("%s: %v (%s), want %v (%s)", name, r.Err, r.Remedy, c.want, c.remedy)
		}
	}
}

// Host processes are carried where pods cannot be.
func TestHostAloneBesideFilteredBridges(t *testing.T) {
	spec := pods()
	spec.BridgeNF = true
	l := newLab(t, netns.IptablesNFT, spec)
	before := l.snapshot()
	if err := l.Node.Do(func() error {
		if r := New(Config{Clients: everybody}).Preflight(t.Context()); !errors.Is(r.Err, intercept.ErrNotSupported) {
			t.Errorf("with pods: %v", r.Err)
		}
		return New(Config{Clients: rules.Clients{Host: true}}).Preflight(t.Context()).Err
	}); err != nil {
		t.Error(err)
	}
	for _, line := range before.Diff(l.snapshot()) {
		t.Errorf("preflight has changed: %s", line)
	}
	h := l.agent(factories["nft"])
	s := intercepttest.State(rules.Direct)
	s.Clients.Pods, s.Diverts = false, s.Diverts[:1]
	if _, err := h.Apply(s); err != nil {
		t.Fatal(err)
	}
	for _, a := range addresses {
		if got := sees(l.Node, a, patience); got != "kas" {
			t.Errorf("the host at %s meets %s", a, got)
		}
		for _, p := range l.clients()[1:] {
			if got := sees(p, a, patience); got != "KAS" {
				t.Errorf("%s at %s meets %s, want to be left alone", p.Label, a, got)
			}
		}
	}
	l.end(h, before)
}

func TestPreflightWithoutPrivilege(t *testing.T) {
	l := newLab(t, netns.NoKubeProxy, netns.Spec{})
	data, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "kasway-tproxy")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	exe := filepath.Join(dir, "agent")
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(exe, data, 0o755)); err != nil {
		t.Fatal(err)
	}
	cmd := l.Node.Command(exe)
	cmd.Env = []string{preflightEnv + "=1"}
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}
	var out strings.Builder
	cmd.Stdout = &out
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	if !strings.HasPrefix(out.String(), "true ") || !strings.Contains(out.String(), "CAP_NET_ADMIN") {
		t.Errorf("nobody's preflight: %s", out.String())
	}
}
