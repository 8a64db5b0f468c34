package main

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/cmd/internal/cli"
)

// ok runs a command that must succeed.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := command(t, args...)
	if code != cli.OK || errs != "" {
		t.Fatalf("%v: exit %d: %s", args, code, errs)
	}
	return out
}

// anonymise replaces what differs from run to run.
func anonymise(s, dir string) string {
	s = strings.ReplaceAll(s, dir, "DIR")
	for _, years := range []int{0, 1, 9, 10} {
		for _, days := range []int{-3, -2, -1, 0, 1} {
			s = strings.ReplaceAll(s, time.Now().UTC().AddDate(years, 0, days).Format(time.DateOnly), "DATE")
		}
	}
	return s
}

func TestCertsCommands(t *testing.T) {
	t.Chdir(t.TempDir())
	home := t.TempDir()
	dir := filepath.Join(home, "pki")
	var all strings.Builder
	for _, args := range [][]string{
		{"certs", "init", "--dir", dir},
		{"certs", "init", "--dir", dir},
		{"certs", "server", "--dir", dir, "--dns", "kasway.example.com,localhost", "--ip", "192.0.2.10", "--ip", "::1"},
		{"certs", "agent", "--dir", dir, "--name", "node1"},
		{"certs", "agent", "--dir", dir, "--name", "system:node:n2", "--trust-domain", "", "--group", "edge"},
		{"certs", "server", "--dir", dir, "--dns", "a", "--validity", "36500d", "--force"},
		{"certs", "init", "--dir", dir, "--force"},
	} {
		all.WriteString("$ kasway-server " + strings.Join(args, " ") + "\n" + ok(t, args...) + "\n")
	}
	data, err := os.ReadFile(filepath.Join(dir, "ca.crt"))
	if err != nil || len(data) == 0 {
		t.Fatal(err)
	}
	text := anonymise(all.String(), dir)
	t.Chdir(startDir)
	golden(t, "certs", text)
	for _, name := range []string{"ca.key", "server.key", "agent-node1.key", "agent-system:node:n2.key"} {
		if info, err := os.Stat(filepath.Join(dir, name)); err != nil || info.Mode().Perm() != 0o600 {
			t.Errorf("%s: %v, mode %v", name, err, info.Mode())
		}
	}
}

// startDir is where the golden files are.
var startDir = func() string {
	dir, err := os.Getwd()
	if err != nil {
		panic(err)
	}
	return dir
}()

func TestCertsJSON(t *testing.T) {
	dir := t.TempDir()
	ok(t, "certs", "init", "--dir", dir)
	var m struct {
		Kept                                 bool
		Kind, Identity, Certificate, Key, CA string
		NotBefore, NotAfter                  time.Time
	}
	if err := json.Unmarshal([]byte(ok(t, "certs", "agent", "--dir", dir, "--name", "n", "--trust-domain", "td", "--validity", "12h", "-o", "json")), &m); err != nil {
		t.Fatal(err)
	}
	if m.Kept || m.Kind != "agent" || m.Identity != "spiffe://td/agent/n" {
		t.Errorf("%+v", m)
	}
	if left := time.Until(m.NotAfter); left < 11*time.Hour || left > 12*time.Hour {
		t.Errorf("valid for %v", left)
	}
	data, err := os.ReadFile(m.Certificate)
	if err != nil {
		t.Fatal(err)
	}
	block, _ := pem.Decode(data)
	c, err := x509.ParseCertificate(block.Bytes)
	if err != nil || len(c.URIs) != 1 || c.URIs[0].String() != m.Identity {
		t.Errorf("%v %v", c.URIs, err)
	}
	if _, err := os.Stat(m.Key); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(m.CA); err != nil {
		t.Error(err)
	}
}

func TestCertsNeverOverwrite(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	code, _, errs := command(t, "certs", "agent", "--dir", dir, "--name", "n")
	if code != cli.Failed || !strings.Contains(errs, "kasway-server certs init --dir "+dir) {
		t.Errorf("without a CA: exit %d: %s", code, errs)
	}
	ok(t, "certs", "init", "--dir", dir)
	ok(t, "certs", "agent", "--dir", dir, "--name", "n")
	read := func(name string) string {
		data, err := os.ReadFile(filepath.Join(dir, name))
		if err != nil {
			t.Fatal(err)
		}
		return string(data)
	}
	cert, ca := read("agent-n.crt"), read("ca.key")
	code, _, errs = command(t, "certs", "agent", "--dir", dir, "--name", "n")
	if code != cli.Failed || !strings.Contains(errs, "--force") {
		t.Errorf("again: exit %d: %s", code, errs)
	}
	ok(t, "certs", "init", "--dir", dir)
	if read("agent-n.crt") != cert || read("ca.key") != ca {
		t.Error("files were replaced")
	}
	ok(t, "certs", "agent", "--dir", dir, "--name", "n", "--force")
	if read("agent-n.crt") == cert || read("ca.key") != ca {
		t.Error("--force replaced the wrong files")
	}
	// Half a CA is not completed behind the operator's back.
	if err := os.Remove(filepath.Join(dir, "ca.crt")); err != nil {
		t.Fatal(err)
	}
	if code, _, errs = command(t, "certs", "init", "--dir", dir); code != cli.Failed || read("ca.key") != ca {
		t.Errorf("half a CA: exit %d: %s", code, errs)
	}
}

func TestDays(t *testing.T) {
	for in, want := range map[string]time.Duration{"365d": 365 * aDay, "12h": 12 * time.Hour, "1d": aDay, "90m": 90 * time.Minute} {
		var d days
		if err := d.Set(in); err != nil || time.Duration(d) != want {
			t.Errorf("%s is %v (%v)", in, time.Duration(d), err)
		}
	}
	for _, in := range []string{"", "d", "0d", "-1d", "0", "1y", "1.5d", "1000000d", "99999999999999999999d"} {
		var d days
		if err := d.Set(in); err == nil {
			t.Errorf("%q is %v", in, time.Duration(d))
		}
	}
}
