package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
)

// target is something to dial, which counts who did.
func target(t *testing.T, address string) (string, *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	var n atomic.Int64
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String(), &n
}

// as returns the context of an agent.
func as(t *testing.T, f *fakeTunnel, c *x509.Certificate) context.Context {
	t.Helper()
	ctx, err := f.carry.Admit(t.Context(), []*x509.Certificate{c})
	if err != nil {
		t.Fatal(err)
	}
	return ctx
}

func TestCase_B68_WholeChain(t *testing.T) {
	kas, kasDials := target(t, "127.0.0.1:0")
	etcd, etcdDials := target(t, "127.0.0.1:0")
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id, Policy: config.Policy{AllowedDestinations: []string{kas}}})
	ctx := as(t, f, issue(certs.AgentRequest{Name: "node1", TrustDomain: "kasway"}))

	if _, err := f.carry.Dial(ctx, dial.Target{ID: "c1", Name: etcd}); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("etcd: %v", err)
	}
	e := r.log.LastEntry()
	if e.Message != "refused by policy" || e.Data["agent"] != "spiffe://kasway/agent/node1" || e.Data["target"] != etcd || e.Data["conn"] != "c1" {
		t.Errorf("audit line %q %v", e.Message, e.Data)
	}
	if _, body := r.get(t, "/metrics"); !strings.Contains(body, `kasway_server_refused_total{reason="unknown-target"} 1`) {
		t.Error("not counted")
	}
	for _, name := range []string{"kas", kas} {
		c, err := f.carry.Dial(ctx, dial.Target{Name: name})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_ = c.Close()
	}
	eventually(t, "both connections are there", func() bool { return kasDials.Load() == 2 })
	if n := etcdDials.Load(); n != 0 {
		t.Errorf("%d connections to etcd", n)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

func TestCase_B69_DestinationsByNameAndV6(t *testing.T) {
	v6, n6 := target(t, "[::1]:0")
	v4, n4 := target(t, "127.0.0.1:0")
	_, port, _ := net.SplitHostPort(v4)
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id, Policy: config.Policy{AllowedDestinations: []string{"localhost:" + port, v6}}})
	ctx := as(t, f, issue(certs.AgentRequest{Name: "node1"}))
	for _, name := range []string{"localhost:" + port, "LOCALHOST:" + port, v6} {
		c, err := f.carry.Dial(ctx, dial.Target{Name: name})
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		_ = c.Close()
	}
	eventually(t, "all connections are there", func() bool { return n4.Load() == 2 && n6.Load() == 1 })
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}

	o, _ := options(t, newFake(), config.Server{Identity: id, Policy: config.Policy{AllowedDestinations: []string{"fd00::1:6443"}}})
	if err := Run(t.Context(), o); !errors.Is(err, ErrConfig) || !strings.Contains(err.Error(), "[fd00::1]:6443") {
		t.Errorf("an IPv6 address without brackets: %v", err)
	}
}

func TestCase_B89_ExposedKey(t *testing.T) {
	id, _ := pki(t)
	if err := os.Chmod(id.Key, 0o644); err != nil {
		t.Fatal(err)
	}
	o, _ := options(t, newFake(), config.Server{Identity: id})
	if err := Run(t.Context(), o); !errors.Is(err, ErrConfig) || !errors.Is(err, certs.ErrExposedKey) {
		t.Errorf("Run ended with %v", err)
	}
}

func TestGrantsAndUpstreams(t *testing.T) {
	second, n := target(t, "127.0.0.1:0")
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{
		Identity:  id,
		Upstreams: []config.Upstream{{Name: "kas", Addresses: []string{"127.0.0.1:1", second}}},
		Policy: config.Policy{
			AllowedDestinations: []string{"127.0.0.1:2"},
			Agents:              []config.Grant{{Identity: "spiffe://kasway/agent/*", Targets: []string{"kas"}}},
		},
	})
	c, err := f.carry.Dial(as(t, f, issue(certs.AgentRequest{Name: "n", TrustDomain: "kasway"})), dial.Target{Name: "kas"})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	eventually(t, "the second address was used", func() bool { return n.Load() > 0 })
	other := as(t, f, issue(certs.AgentRequest{Name: "n", TrustDomain: "other"}))
	if _, err := f.carry.Dial(other, dial.Target{Name: "kas"}); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("an agent without the grant: %v", err)
	}
	// Its destination is allowed and down: that is told to agents.
	changed := f.carry.Changed()
	if _, err := f.carry.Dial(other, dial.Target{Name: "127.0.0.1:2"}); !errors.Is(err, dial.ErrNoUpstream) {
		t.Errorf("a destination that is down: %v", err)
	}
	<-changed
	if up := f.carry.Upstreams(); !up["kas"] || up["127.0.0.1:2"] || len(up) != 2 {
		t.Errorf("Upstreams = %v", up)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

// The name kas is told as what it means.
func TestStateOfKAS(t *testing.T) {
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id, Policy: config.Policy{AllowedDestinations: []string{"127.0.0.1:1"}}})
	if up := f.carry.Upstreams(); !up["kas"] {
		t.Errorf("at the start: %v", up)
	}
	_, _ = f.carry.Dial(as(t, f, issue(certs.AgentRequest{Name: "n"})), dial.Target{Name: "kas"})
	if up := f.carry.Upstreams(); up["kas"] || up["127.0.0.1:1"] || len(up) != 2 {
		t.Errorf("with its destination down: %v", up)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

func TestAdmit(t *testing.T) {
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id})
	if f.carry.TLS == nil || f.carry.TLS.ClientAuth != tls.RequireAndVerifyClientCert || f.carry.TLS.ClientCAs == nil {
		t.Errorf("TLS %+v", f.carry.TLS)
	}
	if _, err := f.carry.Admit(t.Context(), nil); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("without a certificate: %v", err)
	}
	nameless := issue(certs.AgentRequest{Name: "x"})
	nameless.Subject.CommonName = ""
	if _, err := f.carry.Admit(t.Context(), []*x509.Certificate{nameless}); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("with nobody's certificate: %v", err)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

// here resolves every name to this host.
type here struct{}

func (here) LookupNetIP(context.Context, string, string) ([]netip.Addr, error) {
	return []netip.Addr{netip.MustParseAddr("127.0.0.1")}, nil
}

// A name that starts to mean the server's own host reaches nothing, neither as
// a destination nor as an upstream.
func TestNamesMayNotRebind(t *testing.T) {
	own, dials := target(t, "127.0.0.1:0")
	_, port, _ := net.SplitHostPort(own)
	id, issue := pki(t)
	f := newFake()
	r := startWith(t, f, config.Server{
		Identity:  id,
		Upstreams: []config.Upstream{{Name: "kas", Addresses: []string{"kas.example:" + port}}},
		Policy: config.Policy{
			AllowedDestinations: []string{"evil.example:" + port},
			Agents:              []config.Grant{{Identity: "*", Targets: []string{"*"}}},
		},
	}, func(o *Options) { o.Resolver = here{} })
	ctx := as(t, f, issue(certs.AgentRequest{Name: "n"}))
	for i, name := range []string{"kas", "evil.example:" + port} {
		if _, err := f.carry.Dial(ctx, dial.Target{Name: name}); !errors.Is(err, dial.ErrDenied) {
			t.Errorf("%s: %v", name, err)
		}
		if n := logged(r.log, "refused by policy"); n != i+1 {
			t.Errorf("%s: %d audit lines", name, n)
		}
	}
	if n := dials.Load(); n != 0 {
		t.Errorf("%d connections to the server's own host", n)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

// What is down comes back without anybody's dial.
func TestUpstreamComesBack(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := l.Addr().String()
	_ = l.Close()
	id, issue := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id, Policy: config.Policy{AllowedDestinations: []string{address}}})
	if _, err := f.carry.Dial(as(t, f, issue(certs.AgentRequest{Name: "n"})), dial.Target{Name: "kas"}); !errors.Is(err, dial.ErrNoUpstream) {
		t.Fatalf("nobody listens, and: %v", err)
	}
	target(t, address)
	eventually(t, "it is told to be up", func() bool { return f.carry.Upstreams()["kas"] })
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}
