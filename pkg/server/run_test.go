package server

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/observe"
)

// A kube-apiserver may need the tunnel to become ready: the server is ready
// although nothing answers at its upstream.
func TestReadyWithoutAKAS(t *testing.T) {
	fds := countFDs(t)
	id, _ := pki(t)
	f := newFake()
	r := start(t, f, config.Server{Identity: id, Upstreams: []config.Upstream{{Name: "kas", Addresses: []string{"127.0.0.1:1"}}}})
	if code, body := r.get(t, "/readyz"); code != 200 || body != "ok\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	if code, _ := r.get(t, "/livez"); code != 200 {
		t.Errorf("/livez = %d", code)
	}
	if code, body := r.get(t, "/metrics"); code != 200 || !strings.Contains(body, `kasway_server_upstream_up{address="127.0.0.1:1",upstream="kas"} 1`) {
		t.Errorf("/metrics = %d", code)
	}
	socket := r.options.Config.Observe.AdminSocket
	code, body := fetch(t, observe.SocketClient(socket), "http://admin/status")
	var st Status
	if err := json.Unmarshal([]byte(body), &st); err != nil || code != 200 {
		t.Fatalf("/status = %d %s (%v)", code, body, err)
	}
	if !st.Ready || st.Agents != r.agents || !st.Upstreams["kas"] || st.Insecure || st.Version == "" {
		t.Errorf("status %+v", st)
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Errorf("Run ended with %v", err)
	}
	if _, err := os.Lstat(socket); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket is left: %v", err)
	}
	eventually(t, "descriptors back to base", func() bool { return countFDs(t) <= fds })
}

// What shows the server outlives its links: an operator sees that it stops.
func TestStopsInReverse(t *testing.T) {
	id, _ := pki(t)
	f := newFake()
	f.stopping = make(chan struct{})
	r := start(t, f, config.Server{Identity: id})
	r.stop()
	var body string
	eventually(t, "/readyz says stopping", func() bool {
		var code int
		code, body = r.get(t, "/readyz")
		return code == 503
	})
	if body != "not ready: stopping\n" {
		t.Errorf("/readyz = %q", body)
	}
	if code, _ := r.get(t, "/livez"); code != 200 {
		t.Errorf("/livez = %d", code)
	}
	close(f.stopping)
	if err := <-r.done; err != nil {
		t.Errorf("Run ended with %v", err)
	}
	if c, err := net.Dial("tcp", r.operators); err == nil {
		_ = c.Close()
		t.Error("the operators' port is still open")
	}
}

func TestStopIsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFake()
		f.stopping = make(chan struct{})
		s := &server{tunnel: f}
		served := make(chan struct{})
		begin := time.Now()
		err := s.stop(served)
		if err == nil || time.Since(begin) != stopTimeout {
			t.Errorf("%v after %v", err, time.Since(begin))
		}
		close(f.stopping)
		close(served)
	})
}

func TestALostListenerEndsTheServer(t *testing.T) {
	id, _ := pki(t)
	f := newFake()
	f.err = errors.New("accept: broken")
	o, _ := options(t, f, config.Server{Identity: id})
	if err := Run(t.Context(), o); !errors.Is(err, f.err) {
		t.Errorf("Run ended with %v", err)
	}
}

func TestCase_B91_NoCA(t *testing.T) {
	id, _ := pki(t)
	id.CA = ""
	for name, identity := range map[string]config.Identity{"certificate without CA": id, "nothing": {}} {
		f := newFake()
		o, hook := options(t, f, config.Server{Identity: identity})
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // in which it does not start
		defer cancel()
		err := Run(ctx, o)
		if err == nil {
			t.Fatalf("%s: it ran", name)
		}
		if !errors.Is(err, ErrConfig) || !errors.Is(err, certs.ErrNoCA) {
			t.Errorf("%s: %v", name, err)
		}
		if !strings.Contains(err.Error(), "--ca") || !strings.Contains(err.Error(), "--insecure-agents") {
			t.Errorf("%s: no remedy in %q", name, err)
		}
		if f.carry.Dial != nil || f.l != nil || logged(hook, "ready") > 0 {
			t.Errorf("%s: something was started", name)
		}
	}
}

func TestInsecureAgentsAreLoud(t *testing.T) {
	id, _ := pki(t)
	for name, test := range map[string]struct {
		identity config.Identity
		tls      bool
	}{"plain": {config.Identity{}, false}, "with a certificate": {id, true}} {
		f := newFake()
		c := config.Server{Identity: test.identity, Policy: config.Policy{AllowedDestinations: []string{"localhost:1"}}}
		c.Listen.InsecureAgents = true
		r := start(t, f, c)
		if n := logged(r.log, "INSECURE"); n != 1 {
			t.Errorf("%s: %d warnings", name, n)
		}
		if (f.carry.TLS != nil) != test.tls || test.tls && f.carry.TLS.ClientAuth != 0 {
			t.Errorf("%s: TLS %v", name, f.carry.TLS)
		}
		if _, err := f.carry.Admit(t.Context(), nil); err != nil {
			t.Errorf("%s: an agent without proof: %v", name, err)
		}
		r.stop()
		if err := <-r.done; err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
}

func TestCase_B84_PortTaken(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	id, _ := pki(t)
	for flag, change := range map[string]func(*config.Server){
		"--listen":          func(c *config.Server) { c.Listen.Agents = taken.Addr().String() },
		"--observe-address": func(c *config.Server) { c.Observe.Address = taken.Addr().String() },
	} {
		fds := countFDs(t)
		f := newFake()
		o, _ := options(t, f, config.Server{Identity: id})
		o.Explain = func(err error) error { return fmt.Errorf("in use by its owner: %w", err) }
		change(&o.Config)
		err := Run(t.Context(), o)
		if !errors.Is(err, syscall.EADDRINUSE) || !strings.Contains(err.Error(), taken.Addr().String()) || !strings.Contains(err.Error(), flag) || !strings.Contains(err.Error(), "its owner") {
			t.Errorf("%s: %v", flag, err)
		}
		if n := countFDs(t); n > fds {
			t.Errorf("%s: %d listeners are left open", flag, n-fds)
		}
		// Another port can be used.
		r := start(t, newFake(), config.Server{Identity: id})
		r.stop()
		if err := <-r.done; err != nil {
			t.Error(err)
		}
	}
}

func TestAdminSocketInTheWay(t *testing.T) {
	id, _ := pki(t)
	o, _ := options(t, newFake(), config.Server{Identity: id})
	if err := os.WriteFile(o.Config.Observe.AdminSocket, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := Run(t.Context(), o); err == nil || !strings.Contains(err.Error(), "--admin-socket") {
		t.Errorf("Run ended with %v", err)
	}
}

func TestEmptyPolicyIsWarnedAbout(t *testing.T) {
	id, _ := pki(t)
	r := start(t, newFake(), config.Server{Identity: id})
	if logged(r.log, "no agent may reach anything") != 1 {
		t.Error("no warning")
	}
	r.stop()
	if err := <-r.done; err != nil {
		t.Error(err)
	}
}

func TestStoppedBeforeItStarts(t *testing.T) {
	id, _ := pki(t)
	o, _ := options(t, newFake(), config.Server{Identity: id})
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := Run(ctx, o); err != nil {
		t.Errorf("Run ended with %v", err)
	}
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
