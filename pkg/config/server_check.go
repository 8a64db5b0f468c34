package config

import (
	"fmt"
	"slices"
	"strings"
)

// DefaultTarget is the target that agents mean if no other is configured. The
// first allowed destination answers to it where no upstream is called so.
const DefaultTarget = "kas"

// checkServer looks at what several values mean together.
func checkServer(d *decoder, s *Server) {
	checkIdentity(d, &s.Identity)
	if s.Identity.CA == "" && !s.Listen.InsecureAgents {
		d.reject("identity.ca", "missing; without it anybody could be an agent at %s: name the file with the CA that signs the agents' certificates (or --ca), or let everybody in with listen.insecureAgents: true (or --insecure-agents)", s.Listen.Agents)
	}
	if i, again := twice(s.Policy.AllowedDestinations); again && s.Policy.AllowedDestinations[i] != "" {
		d.reject(fmt.Sprintf("policy.allowedDestinations[%d]", i), "%s is written twice; keep one", s.Policy.AllowedDestinations[i])
	}
	checkUpstreams(d, s.Upstreams)
	checkGrants(d, s)
}

// maxUpstreamAddresses bounds what one connection may try in turn.
const maxUpstreamAddresses = 64

func checkUpstreams(d *decoder, upstreams []Upstream) {
	first := map[string]int{}
	for i, u := range upstreams {
		path := fmt.Sprintf("upstreams[%d]", i)
		if u.Name == "" {
			d.reject(path+".name", "missing; name what the agents mean, such as %s", DefaultTarget)
		} else if n, taken := first[u.Name]; taken {
			d.reject(path+".name", "%q is the name of upstream %d as well; give each its own", u.Name, n+1)
		} else {
			first[u.Name] = i
		}
		if len(u.Addresses) == 0 {
			d.reject(path+".addresses", "missing; name at least one kube-apiserver, HOST:PORT")
		}
		if len(u.Addresses) > maxUpstreamAddresses {
			d.reject(path+".addresses", "%d addresses; at most %d are allowed", len(u.Addresses), maxUpstreamAddresses)
		}
		if n, again := twice(u.Addresses); again && u.Addresses[n] != "" {
			d.reject(fmt.Sprintf("%s.addresses[%d]", path, n), "%s is written twice; keep one", u.Addresses[n])
		}
	}
}

func checkGrants(d *decoder, s *Server) {
	known := func(target string) bool {
		return target == "" || target == "*" || strings.Contains(target, ":") ||
			target == DefaultTarget && len(s.Policy.AllowedDestinations) > 0 ||
			slices.ContainsFunc(s.Upstreams, func(u Upstream) bool { return u.Name == target })
	}
	for i, g := range s.Policy.Agents {
		path := fmt.Sprintf("policy.agents[%d]", i)
		if g.Identity == "" {
			d.reject(path+".identity", "missing; name an identity, or its beginning and * at the end")
		}
		if len(g.Targets) == 0 {
			d.reject(path+".targets", "missing; name upstreams or HOST:PORT, or * for all")
		}
		for j, target := range g.Targets {
			if !known(target) {
				d.reject(fmt.Sprintf("%s.targets[%d]", path, j), "no upstream is called %q; allowed: the names under upstreams, HOST:PORT, *", target)
			}
		}
	}
}
