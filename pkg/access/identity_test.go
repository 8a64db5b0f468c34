package access

import (
	"context"
	"crypto/x509"
	"crypto/x509/pkix"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
)

func certificate(t *testing.T, cn string, orgs []string, uris ...string) *x509.Certificate {
	t.Helper()
	c := &x509.Certificate{
		Subject:  pkix.Name{CommonName: cn, Organization: orgs},
		NotAfter: time.Unix(2000000000, 0),
	}
	for _, s := range uris {
		u, err := url.Parse(s)
		if err != nil {
			t.Fatal(err)
		}
		c.URIs = append(c.URIs, u)
	}
	return c
}

func TestIdentityOfACertificate(t *testing.T) {
	expires := time.Unix(2000000000, 0)
	for _, test := range []struct {
		name string
		cert *x509.Certificate
		want Identity
		text string
	}{
		{"SPIFFE", certificate(t, "other", nil, "spiffe://prod.example/agent/node1"),
			Identity{Name: "node1", TrustDomain: "prod.example", Expires: expires}, "spiffe://prod.example/agent/node1"},
		{"common name", certificate(t, "system:node:n1", []string{"system:nodes", "b"}),
			Identity{Name: "system:node:n1", Groups: []string{"system:nodes", "b"}, Expires: expires}, "system:node:n1"},
		{"other URI", certificate(t, "node1", nil, "https://node1.example"),
			Identity{Name: "node1", Expires: expires}, "node1"},
	} {
		t.Run(test.name, func(t *testing.T) {
			got, err := FromCertificate(test.cert)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Error(diff)
			}
			if got.String() != test.text {
				t.Errorf("String() = %q, want %q", got, test.text)
			}
		})
	}
}

// A certificate that says it is something else must not become an agent by its
// common name.
func TestCertificateThatIsNoAgents(t *testing.T) {
	for _, test := range []struct {
		name, want string
		cert       *x509.Certificate
	}{
		{"workload", "not an agent's", certificate(t, "node1", nil, "spiffe://prod.example/ns/default/sa/x")},
		{"no name", "not an agent's", certificate(t, "node1", nil, "spiffe://prod.example/agent")},
		{"two parts", "not an agent's", certificate(t, "node1", nil, "spiffe://prod.example/agent/a/b")},
		{"empty name", "SPIFFE ID", certificate(t, "node1", nil, "spiffe://prod.example/agent/")},
		{"bad domain", "SPIFFE ID", certificate(t, "node1", nil, "spiffe://PROD/agent/x")},
		{"scheme in capitals", "SPIFFE ID", certificate(t, "node1", nil, "SPIFFE://prod.example/ns/x")},
		{"two URIs", "no other URI", certificate(t, "node1", nil, "https://a.example", "spiffe://prod.example/agent/x")},
		{"nothing", "neither", certificate(t, "", nil)},
		{"control character", `a\nb`, certificate(t, "a\nb", nil)},
		{"too long", "300 bytes", certificate(t, strings.Repeat("x", 300), nil)},
	} {
		t.Run(test.name, func(t *testing.T) {
			id, err := FromCertificate(test.cert)
			if err == nil {
				t.Fatalf("became %v", id)
			}
			if !strings.Contains(err.Error(), test.want) || strings.Contains(err.Error(), "\n") {
				t.Errorf("error %q, want %q in one line", err, test.want)
			}
		})
	}
}

func TestIdentityTravelsInTheContext(t *testing.T) {
	if id, ok := From(context.Background()); ok {
		t.Errorf("nobody is %v", id)
	}
	id, ok := From(With(context.Background(), Identity{Name: "node1"}))
	if !ok || id.Name != "node1" {
		t.Errorf("From = %v %v", id, ok)
	}
}
