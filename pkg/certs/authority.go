package certs

import (
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"net/url"
	"strings"
	"time"

	"github.com/spiffe/go-spiffe/v2/spiffeid"
)

// backdate lets a certificate be used at once by a host whose clock is late.
const backdate = 5 * time.Minute

// Pair is a certificate with its key, as PEM.
type Pair struct {
	Certificate *x509.Certificate
	CertPEM     []byte
	KeyPEM      []byte
}

// Authority signs certificates.
type Authority struct {
	Pair
	key crypto.Signer
}

// NewAuthority makes a self-signed authority that may sign certificates of
// servers and agents, and no authorities.
func NewAuthority(name string, validity time.Duration) (*Authority, error) {
	if validity <= 0 {
		return nil, fmt.Errorf("validity %v: must be more than 0", validity)
	}
	now := time.Now()
	template := &x509.Certificate{
		Subject:               pkix.Name{CommonName: name},
		NotBefore:             now.Add(-backdate),
		NotAfter:              now.Add(validity),
		KeyUsage:              x509.KeyUsageCertSign | x509.KeyUsageCRLSign,
		BasicConstraintsValid: true,
		IsCA:                  true,
		MaxPathLenZero:        true,
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, fmt.Errorf("making a key: %w", err)
	}
	pair, err := sign(template, template, key, key)
	if err != nil {
		return nil, err
	}
	return &Authority{Pair: pair, key: key}, nil
}

// ServerRequest asks for a server's certificate.
type ServerRequest struct {
	// DNS and IPs are the names under which agents know the server; at least
	// one of either.
	DNS      []string
	IPs      []netip.Addr
	Validity time.Duration
}

// IssueServer makes a key and a certificate that proves a server, and nothing
// else. It ends with the authority's own, if that is sooner than asked for.
func (a *Authority) IssueServer(r ServerRequest) (Pair, error) {
	template, err := a.template(r.Validity, x509.ExtKeyUsageServerAuth)
	if err != nil {
		return Pair{}, err
	}
	names := make([]string, 0, len(r.DNS)+len(r.IPs))
	for _, name := range r.DNS {
		if err := checkDNS(name); err != nil {
			return Pair{}, err
		}
		names = append(names, name)
	}
	for _, ip := range r.IPs {
		template.IPAddresses = append(template.IPAddresses, net.IP(ip.Unmap().AsSlice()))
		names = append(names, ip.String())
	}
	if len(names) == 0 {
		return Pair{}, errors.New("a server's certificate needs a DNS name or an IP address")
	}
	template.DNSNames = r.DNS
	template.Subject.CommonName = commonName(names[0])
	return a.issue(template)
}

// AgentRequest asks for an agent's certificate.
type AgentRequest struct {
	Name string
	// TrustDomain makes the identity spiffe://<trust domain>/agent/<name>;
	// empty: the identity is the common name alone.
	TrustDomain string
	// Groups become the organisations of the subject.
	Groups   []string
	Validity time.Duration
}

// IssueAgent makes a key and a certificate that proves an agent, and nothing
// else. It ends with the authority's own, if that is sooner than asked for.
func (a *Authority) IssueAgent(r AgentRequest) (Pair, error) {
	template, err := a.template(r.Validity, x509.ExtKeyUsageClientAuth)
	if err != nil {
		return Pair{}, err
	}
	if r.Name == "" || len(r.Name) > maxCommonName {
		return Pair{}, fmt.Errorf("agent name %q: must have 1 to %d bytes", r.Name, maxCommonName)
	}
	template.Subject = pkix.Name{CommonName: r.Name, Organization: r.Groups}
	if r.TrustDomain != "" {
		uri, err := spiffeURI(r.TrustDomain, r.Name)
		if err != nil {
			return Pair{}, err
		}
		template.URIs = []*url.URL{uri}
	}
	return a.issue(template)
}

func spiffeURI(domain, name string) (*url.URL, error) {
	td, err := spiffeid.TrustDomainFromString(domain)
	if err != nil || strings.Contains(domain, "/") {
		return nil, fmt.Errorf("trust domain %q: want lower-case letters, digits, dots, hyphens and underscores", domain)
	}
	id, err := spiffeid.FromSegments(td, "agent", name)
	if err != nil {
		return nil, fmt.Errorf("agent name %q cannot be part of a SPIFFE ID (letters, digits, dots, hyphens and underscores can); an empty trust domain leaves the ID out", name)
	}
	return id.URL(), nil
}

// template is what the certificates of servers and agents have in common.
func (a *Authority) template(validity time.Duration, usage x509.ExtKeyUsage) (*x509.Certificate, error) {
	now := time.Now()
	if validity <= 0 {
		return nil, fmt.Errorf("validity %v: must be more than 0", validity)
	}
	if !now.Before(a.Certificate.NotAfter) {
		return nil, fmt.Errorf("the authority expired on %s", day(a.Certificate.NotAfter))
	}
	until := now.Add(validity)
	if until.After(a.Certificate.NotAfter) {
		until = a.Certificate.NotAfter
	}
	return &x509.Certificate{
		NotBefore:             now.Add(-backdate),
		NotAfter:              until,
		KeyUsage:              x509.KeyUsageDigitalSignature,
		ExtKeyUsage:           []x509.ExtKeyUsage{usage},
		BasicConstraintsValid: true,
	}, nil
}

func (a *Authority) issue(template *x509.Certificate) (Pair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return Pair{}, fmt.Errorf("making a key: %w", err)
	}
	return sign(template, a.Certificate, key, a.key)
}

// sign makes the certificate; its serial number is random.
func sign(template, parent *x509.Certificate, key *ecdsa.PrivateKey, by crypto.Signer) (Pair, error) {
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), by)
	if err != nil {
		return Pair{}, fmt.Errorf("signing: %w", err)
	}
	parsed, err := x509.ParseCertificate(der)
	if err != nil {
		return Pair{}, fmt.Errorf("reading what was signed: %w", err)
	}
	private, err := x509.MarshalPKCS8PrivateKey(key)
	if err != nil {
		return Pair{}, fmt.Errorf("encoding a key: %w", err)
	}
	return Pair{
		Certificate: parsed,
		CertPEM:     pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der}),
		KeyPEM:      pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: private}),
	}, nil
}

// maxCommonName is X.509's own bound.
const maxCommonName = 64

func commonName(name string) string {
	if len(name) > maxCommonName {
		return ""
	}
	return name
}

func checkDNS(name string) error {
	if _, err := netip.ParseAddr(name); err == nil {
		return fmt.Errorf("%s is an IP address, not a DNS name", name)
	}
	trimmed := strings.TrimPrefix(name, "*.")
	ok := trimmed != "" && len(name) <= 253 && !strings.ContainsFunc(trimmed, func(c rune) bool {
		return !(c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '.' || c == '_')
	})
	for label := range strings.SplitSeq(trimmed, ".") {
		ok = ok && label != "" && len(label) <= 63
	}
	if !ok {
		return fmt.Errorf("%q is not a DNS name", name)
	}
	return nil
}

func day(t time.Time) string { return t.UTC().Format(time.DateOnly) }
