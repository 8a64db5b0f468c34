package certs

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// files puts a pair and an authority's certificate into a new directory.
func files(t *testing.T, p Pair, ca *Authority) Files {
	t.Helper()
	dir := t.TempDir()
	cert, key, err := Save(dir, "leaf", p, false)
	if err != nil {
		t.Fatal(err)
	}
	f := Files{Certificate: cert, Key: key, CA: filepath.Join(dir, "ca.crt")}
	if err := os.WriteFile(f.CA, ca.CertPEM, 0o644); err != nil {
		t.Fatal(err)
	}
	return f
}

func load(t *testing.T, f Files) *Credentials {
	t.Helper()
	c, err := Load(f)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// handshake runs one between two configurations and returns what each side
// says, after a byte has gone both ways: in TLS 1.3 a client learns only then
// that it was refused.
func handshake(t *testing.T, server, client *tls.Config) (serverErr, clientErr error) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	done := make(chan error, 1)
	go func() {
		raw, err := l.Accept()
		if err != nil {
			done <- err
			return
		}
		c := tls.Server(raw, server)
		defer func() { _ = c.Close() }()
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		_, err = c.Read(make([]byte, 1))
		if err == nil {
			_, err = c.Write([]byte{1})
		}
		done <- err
	}()
	client = client.Clone()
	if client.ServerName == "" {
		client.ServerName = "server.example"
	}
	c, err := tls.Dial("tcp", l.Addr().String(), client)
	if err != nil {
		return <-done, err
	}
	defer func() { _ = c.Close() }()
	_ = c.SetDeadline(time.Now().Add(10 * time.Second))
	_, clientErr = c.Write([]byte{1})
	if clientErr == nil {
		_, clientErr = c.Read(make([]byte, 1))
	}
	if v := c.ConnectionState().Version; clientErr == nil && v != tls.VersionTLS13 {
		t.Errorf("version %x", v)
	}
	return <-done, clientErr
}

func configs(t *testing.T, server, agent Files) (*tls.Config, *tls.Config) {
	t.Helper()
	s, err := load(t, server).Server()
	if err != nil {
		t.Fatal(err)
	}
	c, err := load(t, agent).Client()
	if err != nil {
		t.Fatal(err)
	}
	return s, c
}

func TestHandshake(t *testing.T) {
	a := authority(t)
	s, c := configs(t, files(t, server(t, a), a), files(t, agent(t, a), a))
	if serverErr, clientErr := handshake(t, s, c); serverErr != nil || clientErr != nil {
		t.Fatalf("server: %v; agent: %v", serverErr, clientErr)
	}
	c.ServerName = "other.example"
	if _, err := handshake(t, s, c); err == nil {
		t.Error("the server's name is not verified")
	}
}

// A resumed session would outlive the certificate that it was made with.
func TestNothingIsResumed(t *testing.T) {
	a := authority(t)
	s, c := configs(t, files(t, server(t, a), a), files(t, agent(t, a), a))
	c.ClientSessionCache = tls.NewLRUClientSessionCache(1)
	c.VerifyConnection = func(state tls.ConnectionState) error {
		if state.DidResume {
			return errors.New("resumed")
		}
		return nil
	}
	for range 2 {
		if serverErr, clientErr := handshake(t, s, c); serverErr != nil || clientErr != nil {
			t.Errorf("server: %v; agent: %v", serverErr, clientErr)
		}
	}
}

func TestHandshakeWithTheWrongPeer(t *testing.T) {
	a, other := authority(t), authority(t)
	s, c := configs(t, files(t, server(t, a), a), files(t, agent(t, a), a))
	refused := func(what, who string, s, c *tls.Config) {
		t.Helper()
		serverErr, clientErr := handshake(t, s, c)
		if serverErr == nil || clientErr == nil {
			t.Errorf("%s was let in: server: %v; agent: %v", what, serverErr, clientErr)
		}
		judge := serverErr
		if who == "agent" {
			judge = clientErr
		}
		var x *tls.CertificateVerificationError
		if !errors.As(judge, &x) && !strings.Contains(fmt.Sprint(judge), "didn't provide a certificate") {
			t.Errorf("%s: the %s says %v", what, who, judge)
		}
	}
	_, stranger := configs(t, files(t, server(t, a), a), files(t, agent(t, other), a))
	refused("an agent of another CA", "server", s, stranger)
	impostor, _ := configs(t, files(t, server(t, other), a), files(t, agent(t, a), a))
	refused("a server of another CA", "agent", impostor, c)

	nobody := c.Clone()
	nobody.Certificates = nil
	refused("an agent without a certificate", "server", s, nobody)

	// What Load refuses at the start is refused by the peer as well.
	wrong := c.Clone()
	wrong.Certificates = s.Certificates
	refused("a server as an agent", "server", s, wrong)
	wrong = s.Clone()
	wrong.Certificates = c.Certificates
	agentName := c.Clone()
	agentName.ServerName = "node1"
	refused("an agent as a server", "agent", wrong, agentName)

	later := func() time.Time { return time.Now().Add(2 * year) }
	expired := s.Clone()
	expired.Time = later
	refused("an expired agent", "server", expired, c)
	expired = c.Clone()
	expired.Time = later
	refused("an expired server", "agent", s, expired)

	old := c.Clone()
	old.MinVersion, old.MaxVersion = tls.VersionTLS12, tls.VersionTLS12
	if serverErr, clientErr := handshake(t, s, old); serverErr == nil || clientErr == nil {
		t.Errorf("TLS 1.2: %v, %v", serverErr, clientErr)
	}
}

func TestServerWithoutCA(t *testing.T) {
	a := authority(t)
	f := files(t, server(t, a), a)
	f.CA = ""
	if cfg, err := load(t, f).Server(); !errors.Is(err, ErrNoCA) || cfg != nil {
		t.Errorf("a server without CA: %v", err)
	}
	cfg, err := load(t, f).InsecureServer()
	if err != nil {
		t.Fatal(err)
	}
	_, c := configs(t, files(t, server(t, a), a), files(t, agent(t, a), a))
	c.Certificates = nil
	if serverErr, clientErr := handshake(t, cfg, c); serverErr != nil || clientErr != nil {
		t.Errorf("insecure: server: %v; agent: %v", serverErr, clientErr)
	}
	f = files(t, agent(t, a), a)
	f.CA = ""
	if _, err := load(t, f).Client(); !errors.Is(err, ErrNoCA) {
		t.Errorf("an agent that trusts anybody: %v", err)
	}
}

func TestCase_B89_ExposedKey(t *testing.T) {
	a := authority(t)
	f := files(t, server(t, a), a)
	for mode, exposed := range map[os.FileMode]bool{
		0o600: false, 0o400: false, 0o640: true, 0o440: true,
		0o644: true, 0o604: true, 0o666: true, 0o660: true, 0o620: true, 0o601: true,
	} {
		if err := os.Chmod(f.Key, mode); err != nil {
			t.Fatal(err)
		}
		_, err := Load(f)
		if errors.Is(err, ErrExposedKey) != exposed || (err != nil) != exposed {
			t.Errorf("mode %o: %v", mode, err)
		}
		if exposed && !strings.Contains(err.Error(), "chmod 600 "+f.Key) {
			t.Errorf("mode %o: no remedy in %q", mode, err)
		}
		if err := CheckKey(f.Key); errors.Is(err, ErrExposedKey) != exposed {
			t.Errorf("CheckKey at mode %o: %v", mode, err)
		}
	}
	// Through a link, as Kubernetes mounts secrets, it is the file that counts.
	link := f.Key + ".link"
	if err := os.Symlink(f.Key, link); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(f.Key, 0o644); err != nil {
		t.Fatal(err)
	}
	f.Key = link
	if _, err := Load(f); !errors.Is(err, ErrExposedKey) {
		t.Errorf("through a link: %v", err)
	}
}

func TestWrongFiles(t *testing.T) {
	a := authority(t)
	good, wrong := files(t, server(t, a), a), files(t, agent(t, a), a)
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("no PEM"), 0o600); err != nil {
		t.Fatal(err)
	}
	huge := filepath.Join(t.TempDir(), "huge")
	if err := os.WriteFile(huge, make([]byte, maxFile+1), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		name, want string
		change     func(*Files)
	}{
		{"no key", "together", func(f *Files) { f.Key = "" }},
		{"no certificate", "together", func(f *Files) { f.Certificate = "" }},
		{"missing", "no such file", func(f *Files) { f.Key += "x" }},
		{"another's key", "does not match", func(f *Files) { f.Key = wrong.Key }},
		{"garbage", garbage, func(f *Files) { f.Certificate = garbage }},
		{"huge", "more than", func(f *Files) { f.CA = huge }},
		{"leaf as CA", "is not an authority's", func(f *Files) { f.CA = f.Certificate }},
		{"empty CA", "no PEM certificate", func(f *Files) { f.CA = garbage }},
		{"key as CA", "holds a PRIVATE KEY", func(f *Files) { f.CA = f.Key }},
	} {
		f := good
		test.change(&f)
		if _, err := Load(f); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%s: %v, want %q", test.name, err, test.want)
		}
	}
	if _, err := load(t, wrong).Server(); err == nil || !strings.Contains(err.Error(), "not one for a server") {
		t.Errorf("an agent's certificate for a server: %v", err)
	}
	if _, err := load(t, good).Client(); err == nil || !strings.Contains(err.Error(), "not one for an agent") {
		t.Errorf("a server's certificate for an agent: %v", err)
	}
}

func TestWarnings(t *testing.T) {
	a := authority(t)
	c := load(t, files(t, server(t, a), a))
	for after, want := range map[time.Duration]string{
		0:                             "",
		year - warnBefore - time.Hour: "",
		year - warnBefore + time.Hour: "expires in 29 days",
		year + time.Hour:              "expired on",
		-time.Hour:                    "is this host's clock right?",
	} {
		got := strings.Join(c.Warnings(time.Now().Add(after)), "\n")
		if (want == "") != (got == "") || !strings.Contains(got, want) {
			t.Errorf("after %v: %q, want %q", after, got, want)
		}
	}
	// The authority's end is the end of everything.
	if got := c.Warnings(time.Now().Add(11 * year)); len(got) != 2 || !strings.HasPrefix(got[1], "CA ") {
		t.Errorf("after the authority's end: %q", got)
	}
	// A short-lived certificate is not warned about all its life.
	p, err := a.IssueServer(ServerRequest{DNS: []string{"a"}, Validity: 24 * time.Hour})
	if err != nil {
		t.Fatal(err)
	}
	short := load(t, files(t, p, a))
	if got := short.Warnings(time.Now()); len(got) != 0 {
		t.Errorf("a new one: %q", got)
	}
	if got := short.Warnings(time.Now().Add(20 * time.Hour)); len(got) != 1 || !strings.Contains(got[0], "expires in 4h0m0s") {
		t.Errorf("an old one: %q", got)
	}
}

func TestSeveralAuthorities(t *testing.T) {
	a, b := authority(t), authority(t)
	f := files(t, server(t, a), a)
	if err := os.WriteFile(f.CA, append(a.CertPEM, b.CertPEM...), 0o644); err != nil {
		t.Fatal(err)
	}
	s, _ := configs(t, f, files(t, agent(t, a), a))
	_, c := configs(t, f, files(t, agent(t, b), a))
	if serverErr, clientErr := handshake(t, s, c); serverErr != nil || clientErr != nil {
		t.Errorf("an agent of the second CA: %v, %v", serverErr, clientErr)
	}
	var _ *x509.CertPool = s.ClientCAs
}
