package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel"
)

// pki makes a CA, a server's and an agent's certificate with the commands.
func pki(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	ok(t, "certs", "init", "--dir", dir)
	ok(t, "certs", "server", "--dir", dir, "--ip", "127.0.0.1")
	ok(t, "certs", "agent", "--dir", dir, "--name", "node1")
	return dir
}

func identity(dir string) []string {
	return []string{"--cert", filepath.Join(dir, "server.crt"), "--key", filepath.Join(dir, "server.key"), "--ca", filepath.Join(dir, "ca.crt")}
}

// agent is one that has links to a server.
func agent(t *testing.T, server string, credentials certs.Files) *tunnel.Links {
	t.Helper()
	c, err := certs.Load(credentials)
	if err != nil {
		t.Fatal(err)
	}
	config, err := c.Client()
	if err != nil {
		t.Fatal(err)
	}
	return links(t, server, config)
}

func links(t *testing.T, server string, config *tls.Config) *tunnel.Links {
	t.Helper()
	log, _ := logtest.NewNullLogger()
	l := tunnel.NewLinks(tunnel.LinksConfig{
		Servers: []string{server}, TLS: config, DialContext: (&net.Dialer{}).DialContext,
		Node: "node1", Version: "v0", Log: log,
	})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { _ = l.Run(ctx); close(done) }()
	t.Cleanup(func() { cancel(); <-done })
	return l
}

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// echo is a target that counts its connections.
func echo(t *testing.T) (address string, dials *atomic.Int64) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	dials = new(atomic.Int64)
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			dials.Add(1)
			_, _ = io.Copy(c, c)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() { _ = l.Close(); <-done })
	return l.Addr().String(), dials
}

func files(dir, name string) certs.Files {
	return certs.Files{Certificate: filepath.Join(dir, name+".crt"), Key: filepath.Join(dir, name+".key"), CA: filepath.Join(dir, "ca.crt")}
}

func readyz(t *testing.T, s *served) (int, string) {
	t.Helper()
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	resp, err := c.Get("http://" + s.operators + "/readyz")
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

func TestRunWithoutAgentsIsReady(t *testing.T) {
	s := serve(t, append(identity(pki(t)), "--allowed-destination", "localhost:1")...)
	if code, body := readyz(t, s); code != 200 || body != "ok\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	s.stop()
	if code := <-s.code; code != cli.OK {
		t.Errorf("exit %d: %s", code, s.stderr)
	}
}

func TestCase_B68_ThroughTheTunnel(t *testing.T) {
	dir := pki(t)
	kas, _ := echo(t)
	etcd, etcdDials := echo(t)
	s := serve(t, append(identity(dir), "--allowed-destination", kas)...)
	l := agent(t, s.agents, files(dir, "agent-node1"))
	eventually(t, "the link is up", func() bool { return l.Snapshot().Carries("kas") })

	// The tunnel may answer at the dial or at the first read.
	start := time.Now()
	c, err := l.Dial(t.Context(), dial.Target{ID: "evil", Name: etcd})
	if err == nil {
		_, err = c.Read(make([]byte, 1))
		c.Abort(nil)
	}
	if !errors.Is(err, dial.ErrDenied) || time.Since(start) > 5*time.Second {
		t.Errorf("etcd: %v after %v", err, time.Since(start))
	}
	eventually(t, "the audit line", func() bool { return strings.Contains(s.stderr.String(), "refused by policy") })
	for line := range strings.Lines(s.stderr.String()) {
		if strings.Contains(line, "refused by policy") && (!strings.Contains(line, `"agent":"spiffe://kasway/agent/node1"`) || !strings.Contains(line, etcd)) {
			t.Errorf("audit line %s", line)
		}
	}
	if n := etcdDials.Load(); n != 0 {
		t.Errorf("%d connections to etcd", n)
	}

	c, err = l.Dial(t.Context(), dial.Target{ID: "good", Name: "kas"})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	if err := c.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(c); err != nil || string(got) != "hello" {
		t.Errorf("echo %q %v", got, err)
	}
	if err := c.Close(); err != nil {
		t.Error(err)
	}
	s.stop()
	if code := <-s.code; code != cli.OK {
		t.Errorf("exit %d: %s", code, s.stderr)
	}
}

// What an agent shows is verified by the server itself, not by its peer.
func TestAgentsThatAreNoneAreRefused(t *testing.T) {
	dir, other := pki(t), pki(t)
	ok(t, "certs", "agent", "--dir", dir, "--name", "short", "--validity", "1ms")
	s := serve(t, append(identity(dir), "--allowed-destination", "localhost:1")...)
	stranger := files(other, "agent-node1")
	stranger.CA = filepath.Join(dir, "ca.crt")
	ca, err := certs.Load(certs.Files{CA: filepath.Join(dir, "ca.crt")})
	if err != nil {
		t.Fatal(err)
	}
	anonymous, err := ca.Client()
	if err != nil {
		t.Fatal(err)
	}
	asServer := anonymous.Clone()
	pair, err := tls.LoadX509KeyPair(filepath.Join(dir, "server.crt"), filepath.Join(dir, "server.key"))
	if err != nil {
		t.Fatal(err)
	}
	asServer.Certificates = []tls.Certificate{pair}
	for name, l := range map[string]*tunnel.Links{
		"another CA":           agent(t, s.agents, stranger),
		"expired":              agent(t, s.agents, files(dir, "agent-short")),
		"no certificate":       links(t, s.agents, anonymous),
		"server's certificate": links(t, s.agents, asServer),
	} {
		eventually(t, name+" is refused", func() bool { return l.Snapshot().Links[0].LastError != "" })
		if l.Snapshot().Carries("kas") {
			t.Errorf("%s: has a link", name)
		}
	}
	// Nothing of that hurts the others.
	l := agent(t, s.agents, files(dir, "agent-node1"))
	eventually(t, "the true agent's link is up", func() bool { return l.Snapshot().Carries("x") })
	s.stop()
	if code := <-s.code; code != cli.OK {
		t.Errorf("exit %d: %s", code, s.stderr)
	}
}

func TestCase_B91_RunWithoutCA(t *testing.T) {
	code, _, errs := command(t, "run", "--config", "testdata/empty.yaml", "--listen", "127.0.0.1:0")
	if code != cli.Usage || !strings.Contains(errs, "--ca") || !strings.Contains(errs, "--insecure-agents") {
		t.Errorf("exit %d: %s", code, errs)
	}
	s := serve(t, append(identity(pki(t))[:4], "--insecure-agents", "--allowed-destination", "localhost:1")...)
	if !strings.Contains(s.stderr.String(), "INSECURE") {
		t.Errorf("not loud: %s", s.stderr)
	}
	s.stop()
	if code := <-s.code; code != cli.OK {
		t.Errorf("exit %d", code)
	}
}

func TestCase_B89_RunWithExposedKey(t *testing.T) {
	dir := pki(t)
	key := filepath.Join(dir, "server.key")
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	code, _, errs := command(t, append([]string{"run", "--config", "testdata/empty.yaml", "--listen", "127.0.0.1:0", "--observe-address", "127.0.0.1:0", "--admin-socket", ""}, identity(dir)...)...)
	if code != cli.Usage || !strings.Contains(errs, "chmod 600 "+key) {
		t.Errorf("exit %d: %s", code, errs)
	}
}

func TestCase_B84_RunOnATakenPort(t *testing.T) {
	taken, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer taken.Close()
	code, _, errs := command(t, append([]string{"run", "--config", "testdata/empty.yaml", "--listen", taken.Addr().String(), "--observe-address", "", "--admin-socket", ""}, identity(pki(t))...)...)
	if want := fmt.Sprintf("listen tcp %s", taken.Addr()); code != cli.Failed || !strings.Contains(errs, want) || !strings.Contains(errs, "--listen") {
		t.Errorf("exit %d: %s", code, errs)
	}
}
