package stories

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/kas"
	"github.com/kasway/kasway/tests/netns/stack"
)

// Where the stand-in KAS serves, and what else listens in the control plane.
const (
	kasName     = "kubernetes.default.svc"
	kasPort     = 6443
	servicePort = 443
	rawPort     = 7000 // bare TCP, behind the target "raw"
	etcdPort    = 2379
)

// patience bounds what should happen at once, on a busy machine.
const patience = 10 * time.Second

var (
	kas4 = netip.AddrPortFrom(netns.KAS4, kasPort)
	kas6 = netip.AddrPortFrom(netns.KAS6, kasPort)
	svc4 = netip.AddrPortFrom(netns.ClusterIP4, servicePort)
	svc6 = netip.AddrPortFrom(netns.ClusterIP6, servicePort)
	raw4 = netip.AddrPortFrom(netns.KAS4, rawPort)
	raw6 = netip.AddrPortFrom(netns.KAS6, rawPort)
	etcd = netip.AddrPortFrom(netns.KAS4, etcdPort)
	// What mode listen listens on.
	bind  = netip.MustParseAddr("169.254.77.2")
	bind6 = netip.MustParseAddr("fd77::2")
)

// plan lets the ranges of both sides overlap: the control plane has networks of
// its own with the prefixes of the node's pods and with most of the node's.
func plan() *netns.Plan {
	p := netns.DefaultPlan()
	p.Inside = []netip.Prefix{p.Routed4, p.Routed6, p.Bridge4, p.Bridge6, netip.MustParsePrefix("192.168.77.128/25")}
	p.KAS = append(p.KAS, netns.ClusterIP4, netns.ClusterIP6)
	return &p
}

// scene is a stack with its KAS.
type scene struct {
	*stack.Stack
	kas           *kas.Server
	serving       sync.WaitGroup
	server, agent *stack.Process
	firewall      *netns.Firewall // nil: none
	before        netns.Snapshot  // of the node with its kube-proxy
	end           []func() error
}

// open builds a scene in which nothing of Kasway runs yet; the caller closes it.
func open(spec netns.Spec) (s *scene, err error) {
	if spec.Plan == nil {
		spec.Plan = plan()
	}
	spec.BridgeNF, spec.Masquerade = true, true
	s = &scene{}
	defer func() {
		if err != nil {
			err = errors.Join(err, s.close())
		}
	}()
	topo, err := netns.Build(spec)
	if err != nil {
		return s, err
	}
	s.end = append(s.end, topo.Close)
	dir, err := stack.TempDir()
	if err != nil {
		return s, err
	}
	s.end = append(s.end, func() error { return os.RemoveAll(dir) })
	if s.Stack, err = stack.New(topo, bin, dir); err != nil {
		return s, err
	}
	if s.kas, err = kas.New(kas.Config{Names: []string{kasName}, Addresses: append(topo.Plan.KAS, bind, bind6)}); err != nil {
		return s, err
	}
	s.end = append(s.end, func() error {
		defer s.serving.Wait()
		return s.kas.Close()
	})
	// Loopback is where KASes beside the server listen.
	for _, a := range append(topo.Plan.KAS, netip.MustParseAddr("127.0.0.1")) {
		for _, port := range []uint16{kasPort, servicePort} {
			if err := s.serveKAS(netip.AddrPortFrom(a, port)); err != nil {
				return s, err
			}
		}
	}
	return s, nil
}

// serveKAS lets the KAS serve at one more address, until the scene closes.
func (s *scene) serveKAS(at netip.AddrPort) error {
	l, err := s.ControlPlane.Listen("tcp", at.String())
	if err != nil {
		return err
	}
	s.serving.Go(func() { _ = s.kas.Serve(l) }) // ends with Close
	return nil
}

// close ends everything, the last first.
func (s *scene) close() error {
	var errs []error
	for i := len(s.end) - 1; i >= 0; i-- {
		errs = append(errs, s.end[i]())
	}
	s.end = nil
	return errors.Join(errs...)
}

// newScene is open for one test.
func newScene(t *testing.T, spec netns.Spec) *scene {
	t.Helper()
	netns.Require(t)
	s, err := open(spec)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := s.close(); err != nil {
			t.Error(err)
		}
		s.inspect(t)
	})
	return s
}

// inspect shows what the processes logged if the test has failed, and fails it
// if one of them had a race or a panic.
func (s *scene) inspect(t *testing.T) {
	for _, p := range s.Processes {
		log := p.Log()
		if strings.Contains(log, "DATA RACE") || strings.Contains(log, "panic:") {
			t.Error("a race or a panic in a process")
		}
		if t.Failed() {
			t.Logf("the %s logged:\n%s", p.Name, log)
		}
	}
}

// startServer starts a server that carries to the KAS and to the target "raw".
func (s *scene) startServer(more ...string) (err error) {
	s.server, err = s.Server(kas4.String(), append([]string{"--upstream", "raw=" + raw4.String(), "--grant", "*=raw"}, more...)...)
	return err
}

// diverting are an agent's flags in a mode that diverts.
func diverting(mode string, more ...string) []string {
	return append([]string{"--mode", mode, "--clients", "host,pods",
		"--target", "kas=" + join(svc4, svc6, kas4, kas6), "--target", "raw=" + join(raw4, raw6)}, more...)
}

func join(list ...netip.AddrPort) string {
	var texts []string
	for _, a := range list {
		texts = append(texts, a.String())
	}
	return strings.Join(texts, ",")
}

// start starts both processes, for one test.
func (s *scene) start(t *testing.T, agent []string, server ...string) {
	t.Helper()
	if err := s.startServer(server...); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, agent...)
}

func (s *scene) startAgent(t *testing.T, flags ...string) {
	t.Helper()
	var err error
	if s.agent, err = s.Agent(flags...); err != nil {
		t.Fatal(err)
	}
}

// clients are a host process and pods of both kinds, as far as there are some.
func (s *scene) clients() []*netns.Host {
	all := []*netns.Host{s.Node}
	return append(append(all, s.RoutedPods...), s.BridgedPods...)
}

// client makes requests from h to the address, by the name in the URL.
func (s *scene) client(t *testing.T, h *netns.Host, base string, to netip.AddrPort) *kas.Client {
	t.Helper()
	c, err := s.kasClient(base, func(ctx context.Context, network, _ string) (net.Conn, error) {
		return h.Dial(ctx, network, to.String())
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func (s *scene) kasClient(base string, dial kas.DialFunc) (*kas.Client, error) {
	return kas.NewClient(base, s.kas.CA(), dial, true)
}

// ask makes one request on a connection of its own, as ordinary clients do.
func (s *scene) ask(t *testing.T, h *netns.Host, to netip.AddrPort) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := s.client(t, h, "https://"+to.String(), to)
	defer c.Close()
	_, err := c.Version(ctx)
	return err
}

// served fails the test unless an ordinary client of h is served.
func (s *scene) served(t *testing.T, h *netns.Host, to netip.AddrPort) {
	t.Helper()
	if err := s.ask(t, h, to); err != nil {
		t.Errorf("%s is not served at %s: %v", h.Label, to, err)
	}
}

// servedAgain fails the test unless an ordinary client of h is served after
// some tries.
func (s *scene) servedAgain(t *testing.T, h *netns.Host, to netip.AddrPort) {
	t.Helper()
	if err := netns.Poll(patience, func() error { return s.ask(t, h, to) }); err != nil {
		t.Errorf("%s is not served at %s: %v", h.Label, to, err)
	}
}

// steady remembers what the processes hold now; the returned function fails
// the test unless they come back to it.
func (s *scene) steady(t *testing.T) func() {
	t.Helper()
	processes := []*stack.Process{s.server, s.agent}
	base := make([]stack.Usage, len(processes))
	for i, p := range processes {
		var err error
		if base[i], err = p.Usage(); err != nil {
			t.Fatal(err)
		}
	}
	return func() {
		t.Helper()
		for i, p := range processes {
			err := netns.Poll(patience, func() error {
				now, err := p.Usage()
				if err == nil && now.Exceeds(base[i]) {
					err = fmt.Errorf("holds %+v, and held %+v before", now, base[i])
				}
				return err
			})
			if err != nil {
				t.Errorf("%s: %v", p.Name, err)
			}
		}
	}
}

// metric is one sample of a process, 0 if it has none of that name.
func metric(t *testing.T, p *stack.Process, sample string) float64 {
	t.Helper()
	all, err := p.Metrics()
	if err != nil {
		t.Fatal(err)
	}
	return all[sample]
}

// rises waits until a sample is by at least n above what it was.
func rises(t *testing.T, p *stack.Process, sample string, was, n float64) {
	t.Helper()
	err := netns.Poll(patience, func() error {
		all, err := p.Metrics()
		if err == nil && all[sample] < was+n {
			err = fmt.Errorf("%s is %v, want %v or more", sample, all[sample], was+n)
		}
		return err
	})
	if err != nil {
		t.Error(err)
	}
}

// logged waits until a line of p's log from byte offset on holds every text.
func logged(t *testing.T, p *stack.Process, from int, texts ...string) {
	t.Helper()
	err := netns.Poll(patience, func() error {
		for line := range strings.Lines(p.Log()[from:]) {
			found := true
			for _, text := range texts {
				found = found && strings.Contains(line, text)
			}
			if found {
				return nil
			}
		}
		return fmt.Errorf("no line of the log has all of %q", texts)
	})
	if err != nil {
		t.Errorf("%s: %v:\n%s", p.Name, err, p.Log()[from:])
	}
}

// shared is a scene that several tests use one after the other, because none
// of them leaves anything changed.
type shared struct {
	build func(*scene) error

	once sync.Once
	use  sync.Mutex
	s    *scene
	err  error
}

// take builds the scene at its first use, and has it until the test ends.
func (sh *shared) take(t *testing.T) *scene {
	t.Helper()
	netns.Require(t)
	sh.use.Lock()
	t.Cleanup(sh.use.Unlock)
	sh.once.Do(func() {
		if sh.s, sh.err = open(netns.Spec{RoutedPods: 1, BridgePods: 1, Neighbour: true}); sh.err == nil {
			sh.err = sh.build(sh.s)
		}
	})
	if sh.s != nil {
		t.Cleanup(func() { sh.s.inspect(t) })
	}
	if sh.err != nil {
		t.Fatal(sh.err)
	}
	return sh.s
}

func (sh *shared) close() error {
	if sh.s == nil {
		return nil
	}
	return sh.s.close()
}
