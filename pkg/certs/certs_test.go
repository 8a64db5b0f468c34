package certs

import (
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/x509"
	"errors"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

const year = 365 * 24 * time.Hour

func authority(t *testing.T) *Authority {
	t.Helper()
	a, err := NewAuthority("test CA", 10*year)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func server(t *testing.T, a *Authority) Pair {
	t.Helper()
	p, err := a.IssueServer(ServerRequest{DNS: []string{"server.example"}, IPs: []netip.Addr{netip.MustParseAddr("127.0.0.1")}, Validity: year})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func agent(t *testing.T, a *Authority) Pair {
	t.Helper()
	p, err := a.IssueAgent(AgentRequest{Name: "node1", TrustDomain: "prod.example", Groups: []string{"edge"}, Validity: year})
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func verify(p Pair, a *Authority, usage x509.ExtKeyUsage, name string, at time.Time) error {
	roots := x509.NewCertPool()
	roots.AddCert(a.Certificate)
	_, err := p.Certificate.Verify(x509.VerifyOptions{Roots: roots, KeyUsages: []x509.ExtKeyUsage{usage}, DNSName: name, CurrentTime: at})
	return err
}

func TestCertificatesVerify(t *testing.T) {
	a := authority(t)
	now := time.Now()
	for _, name := range []string{"server.example", "127.0.0.1"} {
		if err := verify(server(t, a), a, x509.ExtKeyUsageServerAuth, name, now); err != nil {
			t.Errorf("%s: %v", name, err)
		}
	}
	if err := verify(agent(t, a), a, x509.ExtKeyUsageClientAuth, "", now); err != nil {
		t.Error(err)
	}
	// Neither can stand for the other, nor sign.
	if err := verify(server(t, a), a, x509.ExtKeyUsageClientAuth, "", now); err == nil {
		t.Error("a server's certificate serves as an agent's")
	}
	if err := verify(agent(t, a), a, x509.ExtKeyUsageServerAuth, "", now); err == nil {
		t.Error("an agent's certificate serves as a server's")
	}
	for _, p := range []Pair{server(t, a), agent(t, a)} {
		c := p.Certificate
		if c.IsCA || c.KeyUsage != x509.KeyUsageDigitalSignature {
			t.Errorf("leaf: CA %v, key usage %b", c.IsCA, c.KeyUsage)
		}
		if key, ok := c.PublicKey.(*ecdsa.PublicKey); !ok || key.Curve != elliptic.P256() {
			t.Errorf("key is %T", c.PublicKey)
		}
	}
	if err := verify(server(t, authority(t)), a, x509.ExtKeyUsageServerAuth, "server.example", now); err == nil {
		t.Error("another authority's certificate verifies")
	}
	if err := verify(server(t, a), a, x509.ExtKeyUsageServerAuth, "server.example", now.Add(year+time.Minute)); err == nil {
		t.Error("a certificate verifies after its end")
	}
}

func TestContents(t *testing.T) {
	a := authority(t)
	c := agent(t, a).Certificate
	if c.Subject.CommonName != "node1" || len(c.URIs) != 1 || c.URIs[0].String() != "spiffe://prod.example/agent/node1" ||
		!cmp.Equal(c.Subject.Organization, []string{"edge"}) {
		t.Errorf("agent: %v %v", c.Subject, c.URIs)
	}
	if !a.Certificate.IsCA || !a.Certificate.MaxPathLenZero || a.Certificate.Subject.CommonName != "test CA" {
		t.Errorf("authority: %+v", a.Certificate.Subject)
	}
	serials := map[string]bool{}
	for range 8 {
		s := server(t, a).Certificate.SerialNumber
		if s.BitLen() < 64 || serials[s.String()] {
			t.Errorf("serial %v is short or was seen before", s)
		}
		serials[s.String()] = true
	}
	// Nobody's certificate outlives the one it is proven by.
	p, err := a.IssueServer(ServerRequest{DNS: []string{"a"}, Validity: 100 * year})
	if err != nil || !p.Certificate.NotAfter.Equal(a.Certificate.NotAfter) {
		t.Errorf("%v: ends %v, the authority %v", err, p.Certificate.NotAfter, a.Certificate.NotAfter)
	}
	if early := time.Since(c.NotBefore); early < backdate || early > backdate+time.Minute {
		t.Errorf("valid since %v ago", early)
	}
}

func TestWrongRequests(t *testing.T) {
	a := authority(t)
	for _, test := range []struct {
		want string
		r    ServerRequest
	}{
		{"needs a DNS name", ServerRequest{Validity: year}},
		{"is an IP address", ServerRequest{DNS: []string{"10.0.0.1"}, Validity: year}},
		{"not a DNS name", ServerRequest{DNS: []string{"a b"}, Validity: year}},
		{"not a DNS name", ServerRequest{DNS: []string{"a:8091"}, Validity: year}},
		{"not a DNS name", ServerRequest{DNS: []string{""}, Validity: year}},
		{"more than 0", ServerRequest{DNS: []string{"a"}}},
	} {
		if _, err := a.IssueServer(test.r); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.r, err, test.want)
		}
	}
	for _, test := range []struct {
		want string
		r    AgentRequest
	}{
		{"1 to 64", AgentRequest{Validity: year}},
		{"1 to 64", AgentRequest{Name: strings.Repeat("x", 65), Validity: year}},
		{"cannot be part of a SPIFFE ID", AgentRequest{Name: "system:node:a", TrustDomain: "prod", Validity: year}},
		{"trust domain", AgentRequest{Name: "a", TrustDomain: "PROD", Validity: year}},
		{"trust domain", AgentRequest{Name: "a", TrustDomain: "spiffe://prod", Validity: year}},
		{"more than 0", AgentRequest{Name: "a", Validity: -1}},
	} {
		if _, err := a.IssueAgent(test.r); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.r, err, test.want)
		}
	}
	if _, err := a.IssueServer(ServerRequest{DNS: []string{"*.example", strings.Repeat("x.", 40) + "example"}, Validity: year}); err != nil {
		t.Error(err)
	}
	if _, err := a.IssueAgent(AgentRequest{Name: "system:node:a", Validity: year}); err != nil {
		t.Error(err)
	}
}

func TestSaveAndLoadAuthority(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "pki")
	if _, err := LoadAuthority(dir); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("no authority: %v", err)
	}
	a := authority(t)
	cert, key, err := Save(dir, "ca", a.Pair, false)
	if err != nil {
		t.Fatal(err)
	}
	for path, want := range map[string]os.FileMode{dir: 0o700, cert: 0o644, key: 0o600} {
		if info, err := os.Stat(path); err != nil || info.Mode().Perm() != want {
			t.Errorf("%s: %v %v, want %o", path, info.Mode(), err, want)
		}
	}
	again, err := LoadAuthority(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := verify(agent(t, again), a, x509.ExtKeyUsageClientAuth, "", time.Now()); err != nil {
		t.Errorf("the loaded authority's certificate: %v", err)
	}
	// A leaf is no authority, and an exposed authority signs nothing.
	leaf := filepath.Join(t.TempDir(), "leaf")
	if _, _, err := Save(leaf, "ca", agent(t, a), false); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadAuthority(leaf); err == nil || !strings.Contains(err.Error(), "not an authority's") {
		t.Errorf("a leaf as authority: %v", err)
	}
	if err := os.Chmod(key, 0o644); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadAuthority(dir); !errors.Is(err, ErrExposedKey) {
		t.Errorf("exposed authority: %v", err)
	}
}

func TestSaveNeverOverwrites(t *testing.T) {
	dir := t.TempDir()
	a := authority(t)
	first, second := agent(t, a), agent(t, a)
	cert, key, err := Save(dir, "x", first, false)
	if err != nil {
		t.Fatal(err)
	}
	read := func(path string) string {
		b, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	if _, _, err := Save(dir, "x", second, false); !errors.Is(err, ErrExists) {
		t.Errorf("saved over a pair: %v", err)
	}
	// One of the two there is enough, and the other is not made.
	for _, gone := range []string{cert, key} {
		old := read(gone)
		if err := os.Remove(gone); err != nil {
			t.Fatal(err)
		}
		if _, _, err := Save(dir, "x", second, false); !errors.Is(err, ErrExists) {
			t.Errorf("saved over half a pair: %v", err)
		}
		if _, err := os.Stat(gone); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("half a pair was written: %v", err)
		}
		if err := os.WriteFile(gone, []byte(old), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if read(cert) != string(first.CertPEM) || read(key) != string(first.KeyPEM) {
		t.Error("the pair has changed")
	}
	if _, _, err := Save(dir, "x", second, true); err != nil {
		t.Fatal(err)
	}
	if read(cert) != string(second.CertPEM) || read(key) != string(second.KeyPEM) {
		t.Error("force did not replace the pair")
	}
	if info, err := os.Stat(key); err != nil || info.Mode().Perm() != 0o600 {
		t.Errorf("the replaced key: %v %v", info.Mode(), err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("files left behind: %v %v", entries, err)
	}
}

func TestConcurrentSavesHaveOneWinner(t *testing.T) {
	dir := t.TempDir()
	a := authority(t)
	pairs := make([]Pair, 8)
	errs := make([]error, len(pairs))
	for i := range pairs {
		pairs[i] = agent(t, a)
	}
	var wg sync.WaitGroup
	for i := range pairs {
		wg.Go(func() { _, _, errs[i] = Save(dir, "x", pairs[i], false) })
	}
	wg.Wait()
	won := 0
	for i, err := range errs {
		if err == nil {
			won++
			if got, err := os.ReadFile(filepath.Join(dir, "x.crt")); err != nil || string(got) != string(pairs[i].CertPEM) {
				t.Error("the winner's certificate is not there")
			}
		} else if !errors.Is(err, ErrExists) {
			t.Error(err)
		}
	}
	if won != 1 {
		t.Errorf("%d saves won", won)
	}
}
