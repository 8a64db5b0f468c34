package access

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
)

// KAS is the target name that agents use when nobody tells them another.
const KAS = "kas"

// groupPrefix marks a grant to everybody with an organisation in the
// certificate; it is never compared with a name.
const groupPrefix = "group:"

// PolicyConfig is what a Policy is made of.
type PolicyConfig struct {
	// Upstreams are the names of the configured upstreams.
	Upstreams []string
	// AllowedDestinations are the "host:port" that every identified agent may
	// reach. The first also answers to the name kas if no upstream does.
	AllowedDestinations []string
	Grants              []Grant
}

// Grant allows some agents some targets.
type Grant struct {
	// Identity is a SPIFFE ID, or an agent's name in any trust domain, or
	// "group:" and an organisation. A final * stands for any ending.
	Identity string
	// Targets are names of upstreams, "host:port" of their own, kas, or * for
	// every upstream and every allowed destination.
	Targets []string
}

// Policy decides which agent may reach which target. It denies by default and
// does not change once made.
type Policy struct {
	upstreams map[string]bool
	allowed   map[string]bool
	// granted are the destinations that some grant names.
	granted map[string]bool
	// kas is what the target KAS means; empty: nothing.
	kas    string
	grants []grant
}

type grant struct {
	identity string
	all      bool
	targets  map[string]bool
}

// NewPolicy checks c and makes a Policy of it.
func NewPolicy(c PolicyConfig) (*Policy, error) {
	p := &Policy{upstreams: map[string]bool{}, allowed: map[string]bool{}, granted: map[string]bool{}}
	for _, name := range c.Upstreams {
		p.upstreams[name] = true
	}
	for i, s := range c.AllowedDestinations {
		d, err := ParseDestination(s)
		if err != nil {
			return nil, fmt.Errorf("allowed %w", err)
		}
		if i == 0 {
			p.kas = d.String()
		}
		p.allowed[d.String()] = true
	}
	if p.upstreams[KAS] {
		p.kas = KAS
	}
	for _, g := range c.Grants {
		compiled, err := p.compile(g)
		if err != nil {
			return nil, fmt.Errorf("grant to %q: %w", g.Identity, err)
		}
		p.grants = append(p.grants, compiled)
	}
	return p, nil
}

func (p *Policy) compile(g Grant) (grant, error) {
	if g.Identity == "" {
		return grant{}, errors.New("the identity is empty; * means every identified agent")
	}
	if strings.Contains(strings.TrimSuffix(g.Identity, "*"), "*") {
		return grant{}, errors.New("* may only stand at the end of an identity")
	}
	out := grant{identity: g.Identity, targets: map[string]bool{}}
	for _, t := range g.Targets {
		switch {
		case t == "*":
			out.all = true
		case p.upstreams[t]:
			out.targets[t] = true
		case t == KAS && p.kas == "":
			return grant{}, fmt.Errorf("target %q means nothing: there is neither an upstream of that name nor an allowed destination", KAS)
		case t == KAS:
			out.targets[p.kas] = true
		default:
			d, err := ParseDestination(t)
			if err != nil {
				known := slices.Sorted(maps.Keys(p.upstreams))
				return grant{}, fmt.Errorf("target %q is neither an upstream (%s) nor host:port: %w", t, strings.Join(known, ", "), err)
			}
			out.targets[d.String()] = true
			p.granted[d.String()] = true
		}
	}
	if len(g.Targets) == 0 {
		return grant{}, errors.New("no targets; * means every upstream and allowed destination")
	}
	return out, nil
}

// Destinations returns, sorted, every "host:port" that somebody may reach:
// each is an upstream of its own under that name.
func (p *Policy) Destinations() []string {
	all := maps.Clone(p.allowed)
	maps.Copy(all, p.granted)
	return slices.Sorted(maps.Keys(all))
}

// KAS returns the upstream or destination that the target name kas means;
// empty: none.
func (p *Policy) KAS() string { return p.kas }

// Empty reports whether nobody may reach anything.
func (p *Policy) Empty() bool { return len(p.allowed) == 0 && len(p.grants) == 0 }

// Decide says which upstream or destination id reaches by the name of target.
// The reason is empty if it may, and otherwise says why not.
func (p *Policy) Decide(id Identity, target string) (string, Reason) {
	name, ok := p.resolve(target)
	if !ok {
		return "", ReasonUnknown
	}
	if p.allowed[name] {
		return name, ""
	}
	for _, g := range p.grants {
		if g.covers(id) && (g.targets[name] || g.all && p.upstreams[name]) {
			return name, ""
		}
	}
	return "", ReasonForbidden
}

// resolve finds the one spelling of a name that an agent sent.
func (p *Policy) resolve(target string) (string, bool) {
	if target == KAS {
		return p.kas, p.kas != ""
	}
	if p.upstreams[target] {
		return target, true
	}
	d, err := ParseDestination(target)
	if err != nil {
		return "", false
	}
	name := d.String()
	return name, p.allowed[name] || p.granted[name]
}

func (g *grant) covers(id Identity) bool {
	if want, ok := strings.CutPrefix(g.identity, groupPrefix); ok {
		return slices.ContainsFunc(id.Groups, func(have string) bool { return matches(want, have) })
	}
	if strings.HasPrefix(g.identity, "spiffe://") {
		return id.TrustDomain != "" && matches(g.identity, id.String())
	}
	return matches(g.identity, id.Name)
}

// matches compares exactly, or by prefix if the pattern ends in *.
func matches(pattern, s string) bool {
	if prefix, ok := strings.CutSuffix(pattern, "*"); ok {
		return strings.HasPrefix(s, prefix)
	}
	return pattern == s
}
