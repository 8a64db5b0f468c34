package deploy

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/kas"
	"github.com/kasway/kasway/tests/netns/stack"
)

// patience bounds what should happen at once, on a busy machine.
const patience = 20 * time.Second

// Where the stand-in KAS serves, and where clients look for it.
var (
	kas4      = netip.AddrPortFrom(netns.KAS4, 6443)
	kas6      = netip.AddrPortFrom(netns.KAS6, 6443)
	clusterIP = netip.AddrPortFrom(netns.ClusterIP4, 443)
)

// site is a control plane with a KAS, and a node that can reach nothing there
// but the server's port. Each side has a folder for its files.
type site struct {
	*netns.Topology
	kas     *kas.Server
	hosts   string // the file with the names that manifests and README use
	cp, dir string // files of the control plane, of the node
	logs    map[string]*stack.Log
}

func newSite(t *testing.T, spec netns.Spec) *site {
	t.Helper()
	spec.BridgeNF, spec.Masquerade = true, true
	s := &site{Topology: netns.New(t, spec), logs: map[string]*stack.Log{}}
	var err error
	if s.kas, err = kas.New(kas.Config{Addresses: []netip.Addr{netns.KAS4, netns.KAS6, netns.ClusterIP4}}); err != nil {
		t.Fatal(err)
	}
	for _, at := range []string{kas4.String(), kas6.String(), "127.0.0.1:6443"} {
		l, err := s.ControlPlane.Listen("tcp", at)
		if err != nil {
			t.Fatal(err)
		}
		done := make(chan error, 1)
		go func() { done <- s.kas.Serve(l) }()
		t.Cleanup(func() {
			if err := errors.Join(s.kas.Close(), <-done); err != nil {
				t.Error(err)
			}
		})
	}
	s.cp, s.dir = tempDir(t), tempDir(t)
	s.hosts = filepath.Join(s.cp, "hosts")
	text := fmt.Sprintf("127.0.0.1 localhost\n%s kasway.example.com\n%[2]s kas.example.com\n%[3]s kas.example.com\n%[2]s kube-apiserver.control-plane.svc\n",
		s.ControlPlane.Addr4, netns.KAS4, netns.KAS6)
	if err := os.WriteFile(s.hosts, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := s.ControlPlane.FirewallHere(stack.Port); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		for name, log := range s.logs {
			if text := log.String(); t.Failed() || strings.Contains(text, "panic:") {
				t.Errorf("%s wrote:\n%s", name, text)
			}
		}
	})
	return s
}

// tempDir is a folder with a short name: paths of UNIX sockets end at 107 bytes.
func tempDir(t *testing.T) string {
	t.Helper()
	dir, err := stack.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// start starts a command whose log is shown if the test fails.
func (s *site) start(t *testing.T, name string, c *netns.Cmd) {
	t.Helper()
	log := s.logs[name]
	if log == nil {
		log = &stack.Log{}
		s.logs[name] = log
	}
	c.Stdout, c.Stderr = log, log
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
}

// credentials makes a CA, and the keys of a secret for the server and for the
// agent of this node.
func (s *site) credentials(t *testing.T) (server, agent map[string][]byte) {
	t.Helper()
	const validity = time.Hour
	ca, err := certs.NewAuthority("site", validity)
	if err != nil {
		t.Fatal(err)
	}
	sp, err := ca.IssueServer(certs.ServerRequest{DNS: []string{"kasway.example.com"}, Validity: validity})
	if err != nil {
		t.Fatal(err)
	}
	ap, err := ca.IssueAgent(certs.AgentRequest{Name: "node1", TrustDomain: "kasway", Validity: validity})
	if err != nil {
		t.Fatal(err)
	}
	secret := func(p certs.Pair) map[string][]byte {
		return map[string][]byte{"tls.crt": p.CertPEM, "tls.key": p.KeyPEM, "ca.crt": ca.CertPEM}
	}
	return secret(sp), secret(ap)
}

// reach asks the KAS for its version from h; the certificate is verified.
func (s *site) reach(h *netns.Host, at netip.AddrPort) error {
	c, err := kas.NewClient("https://"+at.String(), s.kas.CA(), h.Dial, false)
	if err != nil {
		return err
	}
	defer c.Close()
	ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second)
	defer cancel()
	if _, err = c.Version(ctx); err != nil {
		return fmt.Errorf("from %s: %w", h.Label, err)
	}
	return nil
}

// everybody asks from the host and every pod, at each address.
func (s *site) everybody(at ...netip.AddrPort) error {
	var errs []error
	for _, h := range append(append([]*netns.Host{s.Node}, s.RoutedPods...), s.BridgedPods...) {
		for _, a := range at {
			errs = append(errs, s.reach(h, a))
		}
	}
	return errors.Join(errs...)
}

// nobody is nil if from nowhere an address answers.
func (s *site) nobody(within time.Duration, at ...netip.AddrPort) error {
	for _, h := range append(append([]*netns.Host{s.Node}, s.RoutedPods...), s.BridgedPods...) {
		for _, a := range at {
			if (netns.Probe{From: h, To: a}).Reach(within) == nil {
				return fmt.Errorf("%s reaches %s", h.Label, a)
			}
		}
	}
	return nil
}
