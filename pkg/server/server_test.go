package server

import (
	"context"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// fakeTunnel keeps what Run gives it. stopping, if not nil, holds Stop up.
type fakeTunnel struct {
	carry    Carry
	err      error
	stopping chan struct{}

	mu      sync.Mutex
	l       net.Listener
	stopped chan struct{}
}

func newFake() *fakeTunnel { return &fakeTunnel{stopped: make(chan struct{})} }

func (f *fakeTunnel) make(c Carry) Tunnel { f.carry = c; return f }

func (f *fakeTunnel) Serve(l net.Listener) error {
	f.mu.Lock()
	f.l = l
	f.mu.Unlock()
	if f.err != nil {
		_ = l.Close()
		return f.err
	}
	<-f.stopped
	return l.Close()
}

func (f *fakeTunnel) Stop() {
	if f.stopping != nil {
		<-f.stopping
	}
	close(f.stopped)
}

// running is one Run.
type running struct {
	agents, operators string
	stop              context.CancelFunc
	done              chan error
	log               *logtest.Hook
	options           Options
}

// options are those of a server with everything on a free port.
func options(t *testing.T, f *fakeTunnel, c config.Server) (Options, *logtest.Hook) {
	t.Helper()
	log, hook := logtest.NewNullLogger()
	if c.Listen.Agents == "" {
		c.Listen.Agents = "127.0.0.1:0"
	}
	c.Observe.Address = "127.0.0.1:0"
	c.Observe.AdminSocket = filepath.Join(t.TempDir(), "server.sock")
	return Options{
		Config: c, NewTunnel: f.make, Resolver: net.DefaultResolver, Dialer: &net.Dialer{},
		Log: log, Registry: observe.NewRegistry("server"),
	}, hook
}

func start(t *testing.T, f *fakeTunnel, c config.Server) *running {
	t.Helper()
	return startWith(t, f, c, func(*Options) {})
}

func startWith(t *testing.T, f *fakeTunnel, c config.Server, change func(*Options)) *running {
	t.Helper()
	o, hook := options(t, f, c)
	change(&o)
	r := &running{done: make(chan error, 1), log: hook}
	up := make(chan struct{})
	o.Listening = func(agents, operators net.Addr) {
		r.agents, r.operators = agents.String(), operators.String()
		close(up)
	}
	r.options = o
	ctx, cancel := context.WithCancel(t.Context())
	r.stop = cancel
	t.Cleanup(cancel)
	go func() { r.done <- Run(ctx, o) }()
	select {
	case <-up:
	case err := <-r.done:
		t.Fatalf("Run: %v", err)
	}
	return r
}

func (r *running) get(t *testing.T, path string) (int, string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	return fetch(t, c, "http://"+r.operators+path)
}

func fetch(t *testing.T, c *http.Client, url string) (int, string) {
	t.Helper()
	resp, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return resp.StatusCode, string(body)
}

// eventually polls for what no event tells.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// pki makes credentials for a server, and a function that issues agents'.
func pki(t *testing.T) (config.Identity, func(certs.AgentRequest) *x509.Certificate) {
	t.Helper()
	dir := t.TempDir()
	a, err := certs.NewAuthority("test CA", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	p, err := a.IssueServer(certs.ServerRequest{DNS: []string{"localhost"}, Validity: time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	cert, key, err := certs.Save(dir, "server", p, false)
	if err != nil {
		t.Fatal(err)
	}
	ca := filepath.Join(dir, "ca.crt")
	if err := os.WriteFile(ca, a.CertPEM, 0o644); err != nil {
		t.Fatal(err)
	}
	issue := func(r certs.AgentRequest) *x509.Certificate {
		t.Helper()
		r.Validity = time.Hour
		p, err := a.IssueAgent(r)
		if err != nil {
			t.Fatal(err)
		}
		return p.Certificate
	}
	return config.Identity{Certificate: cert, Key: key, CA: ca}, issue
}

func logged(hook *logtest.Hook, text string) (n int) {
	for _, e := range hook.AllEntries() {
		if strings.Contains(e.Message, text) {
			n++
		}
	}
	return n
}
