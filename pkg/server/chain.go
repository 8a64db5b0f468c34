package server

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"time"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/upstream"
)

// transport returns the agents' TLS, nil for plain text. Without a CA there is
// none, unless anybody may be an agent.
func transport(o Options) (*tls.Config, error) {
	c := o.Config
	credentials, err := certs.Load(certs.Files{Certificate: c.Identity.Certificate, Key: c.Identity.Key, CA: c.Identity.CA})
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	for _, w := range credentials.Warnings(time.Now()) {
		o.Log.Warn(w)
	}
	var t *tls.Config
	switch {
	case !c.Listen.InsecureAgents && c.Identity.CA == "":
		return nil, fmt.Errorf("%w: %w: whoever reaches %s could be an agent; name the CA that proves agents (--ca), or let everybody in (--insecure-agents)", ErrConfig, certs.ErrNoCA, c.Listen.Agents)
	case !c.Listen.InsecureAgents:
		t, err = credentials.Server()
	case c.Identity.Certificate != "":
		t, err = credentials.InsecureServer()
	}
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	if c.Listen.InsecureAgents {
		o.Log.WithField("tls", t != nil).Warn("INSECURE: agents are let in without any proof of who they are: whoever reaches the agents' port reaches every allowed destination")
	}
	return t, nil
}

// admit says who an agent is.
func admit(insecure bool) func(context.Context, []*x509.Certificate) (context.Context, error) {
	return func(ctx context.Context, certificates []*x509.Certificate) (context.Context, error) {
		if insecure {
			return access.With(ctx, access.Anonymous), nil
		}
		if len(certificates) == 0 {
			return nil, &access.Denial{Reason: access.ReasonUnidentified, Detail: "no certificate"}
		}
		id, err := access.FromCertificate(certificates[0])
		if err != nil {
			return nil, &access.Denial{Reason: access.ReasonUnidentified, Detail: err.Error()}
		}
		return access.With(ctx, id), nil
	}
}

func policy(c config.Server) (*access.Policy, error) {
	pc := access.PolicyConfig{AllowedDestinations: c.Policy.AllowedDestinations}
	for _, u := range c.Upstreams {
		pc.Upstreams = append(pc.Upstreams, u.Name)
	}
	for _, g := range c.Policy.Agents {
		pc.Grants = append(pc.Grants, access.Grant{Identity: g.Identity, Targets: g.Targets})
	}
	p, err := access.NewPolicy(pc)
	if err != nil {
		return nil, fmt.Errorf("%w: policy: %w", ErrConfig, err)
	}
	return p, nil
}

// pools makes the configured upstreams, and one of each destination that the
// policy names. All of them dial through the guard of addresses.
func pools(o Options, p *access.Policy) (*upstream.Set, error) {
	metrics := upstream.NewMetrics(o.Registry)
	direct := access.GuardAddresses(o.Resolver, dial.Direct(o.Dialer))
	var all []upstream.Config
	add := func(name string, timeout time.Duration, addresses ...string) {
		all = append(all, upstream.Config{
			Name: name, Addresses: addresses, DialTimeout: timeout,
			Dialer: direct, Log: o.Log, Metrics: metrics,
		})
	}
	for _, u := range o.Config.Upstreams {
		add(u.Name, u.DialTimeout, u.Addresses...)
	}
	for _, d := range p.Destinations() {
		add(d, 0, d)
	}
	set, err := upstream.NewSet(all)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", ErrConfig, err)
	}
	return set, nil
}

// state returns what agents are told: each name that they may use, the name
// kas among them whatever it means here.
func state(set *upstream.Set, p *access.Policy) func() map[string]bool {
	return func() map[string]bool {
		up := set.Up()
		if name := p.KAS(); name != "" {
			up[access.KAS] = up[name]
		}
		return up
	}
}
