package certs

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"os"
	"slices"
	"time"
)

// ErrExposedKey marks a key that others than its owner can read or change.
var ErrExposedKey = errors.New("private key is exposed")

// ErrNoCA: there is no authority to verify the other side with.
var ErrNoCA = errors.New("no CA is configured")

// maxFile bounds what is read from one file, in bytes.
const maxFile = 1 << 20

// Files names a process's credentials, all PEM. Certificate may hold a chain,
// CA several authorities.
type Files struct{ Certificate, Key, CA string }

// Credentials are what Files hold.
type Credentials struct {
	files Files
	pair  *tls.Certificate    // nil: none
	cas   []*x509.Certificate // nil: none
}

// Load reads what is named in f; a name that is empty is not read. Certificate
// and Key come together. It refuses an exposed key (ErrExposedKey).
func Load(f Files) (*Credentials, error) {
	c := &Credentials{files: f}
	if (f.Certificate == "") != (f.Key == "") {
		return nil, errors.New("a certificate and its key must be given together")
	}
	if f.Certificate != "" {
		pair, err := loadPair(f.Certificate, f.Key)
		if err != nil {
			return nil, err
		}
		c.pair = &pair
	}
	if f.CA != "" {
		cas, err := loadCAs(f.CA)
		if err != nil {
			return nil, err
		}
		c.cas = cas
	}
	return c, nil
}

// CheckKey returns an error that wraps ErrExposedKey, with the remedy, if the
// file's mode lets others than its owner do anything with it.
func CheckKey(path string) error {
	info, err := os.Stat(path)
	if err != nil {
		return fmt.Errorf("key: %w", err)
	}
	return checkMode(path, info)
}

func checkMode(path string, info os.FileInfo) error {
	if mode := info.Mode().Perm(); mode&0o077 != 0 {
		return fmt.Errorf("key %s: %w: its mode is %04o; run: chmod 600 %s (in a pod: defaultMode: 0400)", path, ErrExposedKey, mode, path)
	}
	return nil
}

func loadPair(certFile, keyFile string) (tls.Certificate, error) {
	cert, err := readFile("certificate", certFile, nil)
	if err != nil {
		return tls.Certificate{}, err
	}
	key, err := readFile("key", keyFile, checkMode)
	if err != nil {
		return tls.Certificate{}, err
	}
	pair, err := tls.X509KeyPair(cert, key)
	if err != nil {
		return tls.Certificate{}, fmt.Errorf("certificate %s with key %s: %w", certFile, keyFile, err)
	}
	return pair, nil
}

// readFile checks the very file that it reads.
func readFile(what, path string, check func(string, os.FileInfo) error) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if check != nil {
		if err := check(path, info); err != nil {
			return nil, err
		}
	}
	data, err := io.ReadAll(io.LimitReader(f, maxFile+1))
	if err != nil {
		return nil, fmt.Errorf("%s: %w", what, err)
	}
	if len(data) > maxFile {
		return nil, fmt.Errorf("%s %s: more than %d bytes", what, path, maxFile)
	}
	return data, nil
}

func loadCAs(path string) ([]*x509.Certificate, error) {
	rest, err := readFile("CA", path, nil)
	if err != nil {
		return nil, err
	}
	var cas []*x509.Certificate
	for {
		var block *pem.Block
		if block, rest = pem.Decode(rest); block == nil {
			break
		}
		if block.Type != "CERTIFICATE" {
			return nil, fmt.Errorf("CA %s holds a %s besides certificates", path, block.Type)
		}
		c, err := x509.ParseCertificate(block.Bytes)
		if err != nil {
			return nil, fmt.Errorf("CA %s, certificate %d: %w", path, len(cas)+1, err)
		}
		if !c.IsCA {
			return nil, fmt.Errorf("CA %s, certificate %d (%s) is not an authority's", path, len(cas)+1, c.Subject)
		}
		cas = append(cas, c)
	}
	if len(cas) == 0 {
		return nil, fmt.Errorf("CA %s holds no PEM certificate", path)
	}
	return cas, nil
}

// Server returns the configuration of a server that lets in only whom its CA
// proves. Without a CA the error wraps ErrNoCA.
func (c *Credentials) Server() (*tls.Config, error) {
	if c.cas == nil {
		return nil, ErrNoCA
	}
	t, err := c.InsecureServer()
	if err != nil {
		return nil, err
	}
	t.ClientAuth, t.ClientCAs = tls.RequireAndVerifyClientCert, c.pool()
	return t, nil
}

// InsecureServer returns the configuration of a server that proves itself and
// lets everybody in.
func (c *Credentials) InsecureServer() (*tls.Config, error) {
	if c.pair == nil {
		return nil, errors.New("a server needs a certificate and its key")
	}
	if err := c.checkUsage(x509.ExtKeyUsageServerAuth, "a server"); err != nil {
		return nil, err
	}
	return &tls.Config{
		MinVersion:   tls.VersionTLS13,
		Certificates: []tls.Certificate{*c.pair},
		// A resumed session would be a way around a certificate's end.
		SessionTicketsDisabled: true,
	}, nil
}

// Client returns the configuration of an agent that talks only to servers that
// its CA proves; the caller sets ServerName. Without a certificate it proves
// nothing itself, which only a server with insecure agents accepts.
func (c *Credentials) Client() (*tls.Config, error) {
	if c.cas == nil {
		return nil, ErrNoCA
	}
	t := &tls.Config{MinVersion: tls.VersionTLS13, RootCAs: c.pool()}
	if c.pair != nil {
		if err := c.checkUsage(x509.ExtKeyUsageClientAuth, "an agent"); err != nil {
			return nil, err
		}
		t.Certificates = []tls.Certificate{*c.pair}
	}
	return t, nil
}

func (c *Credentials) pool() *x509.CertPool {
	pool := x509.NewCertPool()
	for _, ca := range c.cas {
		pool.AddCert(ca)
	}
	return pool
}

// checkUsage finds at the start what every handshake would fail with.
func (c *Credentials) checkUsage(usage x509.ExtKeyUsage, whose string) error {
	have := c.pair.Leaf.ExtKeyUsage
	if len(have) == 0 || slices.Contains(have, usage) || slices.Contains(have, x509.ExtKeyUsageAny) {
		return nil
	}
	return fmt.Errorf("certificate %s is not one for %s: its extended key usage is another", c.files.Certificate, whose)
}

// warnBefore is how long before its end a certificate is warned about; one
// that lives for less than three times that, in the last third of its life.
const warnBefore = 30 * 24 * time.Hour

// Warnings tells, one sentence each, which certificates are not valid at now,
// or soon will not be. None of them is refused for that here: the other side
// decides, by its own clock.
func (c *Credentials) Warnings(now time.Time) []string {
	var out []string
	add := func(what, path string, x *x509.Certificate) {
		before := min(warnBefore, x.NotAfter.Sub(x.NotBefore)/3)
		switch left := x.NotAfter.Sub(now); {
		case left <= 0:
			out = append(out, fmt.Sprintf("%s %s expired on %s: the other side will refuse it; make a new one", what, path, day(x.NotAfter)))
		case now.Before(x.NotBefore):
			out = append(out, fmt.Sprintf("%s %s is not valid before %s: is this host's clock right?", what, path, x.NotBefore.UTC().Format(time.RFC3339)))
		case left < before:
			out = append(out, fmt.Sprintf("%s %s expires in %s, on %s", what, path, remaining(left), day(x.NotAfter)))
		}
	}
	if c.pair != nil {
		add("certificate", c.files.Certificate, c.pair.Leaf)
	}
	for _, ca := range c.cas {
		add("CA", c.files.CA, ca)
	}
	return out
}

func remaining(d time.Duration) string {
	if days := int(d / (24 * time.Hour)); days > 1 {
		return fmt.Sprintf("%d days", days)
	}
	return d.Round(time.Minute).String()
}
