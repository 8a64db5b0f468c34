package access

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
	"unicode"

	"github.com/spiffe/go-spiffe/v2/spiffeid"

	"github.com/kasway/kasway/pkg/observe"
)

// Identity is who an agent has proven to be.
type Identity struct {
	// Name is the agent's name: the last part of its SPIFFE ID, or the common
	// name of its certificate.
	Name string
	// TrustDomain is the one of the SPIFFE ID; empty without one.
	TrustDomain string
	// Groups are the organisations in the certificate.
	Groups []string
	// Expires is when the proof ends.
	Expires time.Time
}

// Anonymous is the identity of every agent of a server that lets agents in
// without proof.
var Anonymous = Identity{Name: "anonymous"}

// String returns the SPIFFE ID, or the name of an identity that has none.
func (i Identity) String() string {
	if i.TrustDomain == "" {
		return i.Name
	}
	return "spiffe://" + i.TrustDomain + "/agent/" + i.Name
}

// maxName bounds a common name that serves as an identity, in bytes: that of a
// DNS name, which node names are.
const maxName = 253

// FromCertificate returns the identity that a certificate proves, which must
// have been verified before: spiffe://<trust domain>/agent/<name>, else its
// common name with its organisations as groups. A certificate with a SPIFFE ID
// of another kind is somebody else's and never falls back to its common name.
func FromCertificate(c *x509.Certificate) (Identity, error) {
	id := Identity{Groups: slices.Clone(c.Subject.Organization), Expires: c.NotAfter}
	for _, uri := range c.URIs {
		if uri.Scheme != "spiffe" {
			continue
		}
		if len(c.URIs) > 1 {
			return Identity{}, errors.New("a certificate with a SPIFFE ID must have no other URI")
		}
		s, err := spiffeid.FromURI(uri)
		if err != nil {
			return Identity{}, fmt.Errorf("SPIFFE ID %s: %w", observe.Text(uri.String()), err)
		}
		name, ok := strings.CutPrefix(s.Path(), "/agent/")
		if !ok || name == "" || strings.Contains(name, "/") {
			return Identity{}, fmt.Errorf("SPIFFE ID %s is not an agent's: want spiffe://<trust domain>/agent/<name>", s)
		}
		id.Name, id.TrustDomain = name, s.TrustDomain().Name()
		return id, nil
	}
	id.Name = c.Subject.CommonName
	switch {
	case id.Name == "":
		return Identity{}, errors.New("the certificate has neither a SPIFFE ID nor a common name")
	case len(id.Name) > maxName:
		return Identity{}, fmt.Errorf("the common name is %d bytes long, more than %d", len(id.Name), maxName)
	case strings.ContainsFunc(id.Name, func(r rune) bool { return !unicode.IsPrint(r) }):
		return Identity{}, fmt.Errorf("the common name %s is not printable", observe.Text(id.Name))
	}
	return id, nil
}

type contextKey struct{}

// With returns a context of work done for id.
func With(ctx context.Context, id Identity) context.Context {
	return context.WithValue(ctx, contextKey{}, id)
}

// From returns whom work is done for; false if nobody was identified.
func From(ctx context.Context) (Identity, bool) {
	id, ok := ctx.Value(contextKey{}).(Identity)
	return id, ok
}
