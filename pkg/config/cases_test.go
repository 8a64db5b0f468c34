package config

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
)

// Destinations are named by any FQDN and by IPv6 in brackets, in the file and by
// flag, on both sides; without brackets the remedy is told.
func TestCase_B69_DestinationNames(t *testing.T) {
	good := []string{"kas.example.svc:6443", "[fd00::1]:6443", "localhost:6443"}
	const bad, remedy = "fd00::1:6443", "write it in brackets: [fd00::1]:6443"
	server := func(destination string) (Server, error) {
		return ParseServer("server.yaml", []byte("apiVersion: kasway.dev/v1alpha1\nkind: ServerConfig\n"+
			"identity: {certificate: s.crt, key: s.key, ca: ca.crt}\npolicy:\n  allowedDestinations:\n  - \""+destination+"\"\n"))
	}
	credentials := []string{"--cert=s.crt", "--key=s.key", "--ca=ca.crt"}
	agent := []string{"--mode=listen", "--bind-address=169.254.77.2", "--server=[fd00::5]:8091", "--cert=a", "--key=b", "--ca=c"}
	none := filepath.Join(t.TempDir(), "none.yaml")
	for _, name := range good {
		if s, err := server(name); err != nil || s.Policy.AllowedDestinations[0] != name {
			t.Errorf("policy.allowedDestinations: %s: %+v, %v", name, s.Policy, err)
		}
		if s, err := loadServer(t, append(credentials, "--allowed-destination", name)...); err != nil || s.Policy.AllowedDestinations[0] != name {
			t.Errorf("--allowed-destination %s: %+v, %v", name, s.Policy, err)
		}
		if a, err := loadAgent(t, none, append(agent, "--target", "6443:"+name)...); err != nil || a.Targets[0].Name != name {
			t.Errorf("--target 6443:%s: %+v, %v", name, a.Targets, err)
		}
	}
	_, inFile := server(bad)
	_, byFlag := loadServer(t, append(credentials, "--allowed-destination", bad)...)
	_, target := loadAgent(t, none, append(agent, "--target", "6443:"+bad)...)
	for want, err := range map[string]error{"server.yaml:6: policy.allowedDestinations[0]: ": inFile, "--allowed-destination: ": byFlag, "--target: ": target} {
		if err == nil || !strings.HasPrefix(err.Error(), want) || !strings.Contains(err.Error(), remedy) || strings.Contains(err.Error(), "\n") {
			t.Errorf("want one line with %q and %q, got %v", want, remedy, err)
		}
	}
}

func TestCase_B89_KeyPermissions(t *testing.T) {
	dir := t.TempDir()
	identity := Identity{Certificate: filepath.Join(dir, "a.crt"), Key: filepath.Join(dir, "a.key"), CA: filepath.Join(dir, "ca.crt")}
	for _, name := range []string{identity.Certificate, identity.Key, identity.CA} {
		if err := os.WriteFile(name, []byte("x"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for mode, ok := range map[os.FileMode]bool{
		0o600: true, 0o400: true, 0o700: true,
		0o644: false, 0o640: false, 0o604: false, 0o620: false, 0o602: false, 0o601: false, 0o666: false,
	} {
		if err := os.Chmod(identity.Key, mode); err != nil {
			t.Fatal(err)
		}
		err := CheckCredentials(identity)
		if ok && err != nil {
			t.Errorf("mode %04o: %v", mode, err)
		}
		var e *Error
		if !ok && (!errors.As(err, &e) || !strings.HasPrefix(err.Error(), "identity.key: ") || !strings.Contains(err.Error(), "chmod 600 "+identity.Key)) {
			t.Errorf("mode %04o: want a *config.Error with the remedy, got %v", mode, err)
		}
	}
	// The mode that counts is that of the file behind a link, as in a projected
	// volume, whose links have mode 0777.
	link := filepath.Join(dir, "link.key")
	if err := errors.Join(os.Chmod(identity.Key, 0o400), os.Symlink("a.key", link)); err != nil {
		t.Fatal(err)
	}
	identity.Key = link
	if err := CheckCredentials(identity); err != nil {
		t.Error(err)
	}
	// Certificates are public.
	if err := errors.Join(os.Chmod(identity.Certificate, 0o644), os.Chmod(identity.CA, 0o644)); err != nil {
		t.Fatal(err)
	}
	if err := CheckCredentials(identity); err != nil {
		t.Error(err)
	}
}

func TestCheckCredentials(t *testing.T) {
	dir := t.TempDir()
	empty, fifo := filepath.Join(dir, "empty"), filepath.Join(dir, "fifo")
	if err := errors.Join(os.WriteFile(empty, nil, 0o600), syscall.Mkfifo(fifo, 0o600)); err != nil {
		t.Fatal(err)
	}
	err := CheckCredentials(Identity{Certificate: filepath.Join(dir, "none"), Key: fifo, CA: empty})
	var e *Error
	if !errors.As(err, &e) || len(e.Problems) != 3 {
		t.Fatalf("want three problems, got %v", err)
	}
	for i, want := range []string{"identity.certificate: stat " + dir + "/none: no such file", "identity.key: " + fifo + " is not a regular file", "identity.ca: " + empty + " is empty"} {
		if got := e.Problems[i].String(); !strings.HasPrefix(got, want) {
			t.Errorf("got %q, want %q", got, want)
		}
	}
	if err := CheckCredentials(Identity{Key: dir}); err == nil {
		t.Error("a directory is taken for a key")
	}
	if err := CheckCredentials(Identity{}); err != nil {
		t.Errorf("nothing named: %v", err)
	}
}

// A server whose agents nobody verifies does not start, unless it is told so.
func TestCase_B91_AgentPortWithoutCA(t *testing.T) {
	const head = "apiVersion: kasway.dev/v1alpha1\nkind: ServerConfig\nidentity:\n  certificate: s.crt\n  key: s.key\n"
	if s, err := ParseServer("server.yaml", []byte(head+"  ca: ca.crt\n")); err != nil || s.Listen.InsecureAgents || s.Identity.CA != "ca.crt" {
		t.Errorf("with a CA: %+v, %v", s, err)
	}
	if s, err := ParseServer("server.yaml", []byte(head+"listen: {insecureAgents: true}\n")); err != nil || !s.Listen.InsecureAgents {
		t.Errorf("told so: %+v, %v", s, err)
	}
	flags := []string{"--cert=s.crt", "--key=s.key"}
	if _, err := loadServer(t, append(flags, "--insecure-agents")...); err != nil {
		t.Errorf("told so by flag: %v", err)
	}
	if s, err := loadServer(t, append(flags, "--ca=ca.crt")...); err != nil || s.Listen.InsecureAgents {
		t.Errorf("with a CA by flag: %+v, %v", s, err)
	}
	_, inFile := ParseServer("server.yaml", []byte(head+"listen: {insecureAgents: false}\n"))
	_, byFlag := loadServer(t, append(flags, "--insecure-agents=false")...)
	for where, err := range map[string]error{"server.yaml:3: identity.ca: missing": inFile, "identity.ca: missing": byFlag} {
		if err == nil || !strings.HasPrefix(err.Error(), where) || strings.Contains(err.Error(), "\n") {
			t.Errorf("want one line beginning with %q, got %v", where, err)
			continue
		}
		for _, remedy := range []string{"identity.ca", "--ca", "listen.insecureAgents", "--insecure-agents"} {
			if !strings.Contains(err.Error(), remedy) {
				t.Errorf("no remedy %s in %v", remedy, err)
			}
		}
	}
}
