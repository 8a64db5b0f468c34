package config

import (
	"fmt"
	"slices"

	"github.com/kasway/kasway/pkg/rules"
)

// checkAgent looks at what several values mean together, and makes one target
// of each exact address.
func checkAgent(d *decoder, a *Agent) {
	checkTargets(d, a.Targets)
	checkIntercept(d, a)
	checkGuard(d, a)
	checkLinks(d, &a.Links)
	checkIdentity(d, &a.Identity)
	if a.Identity.CA == "" {
		d.missing("identity.ca", "name the file with the CA that the server's certificate is verified against")
	}
	a.Targets = rules.Expand(a.Targets)
}

func checkTargets(d *decoder, targets []rules.Target) {
	if len(targets) == 0 {
		d.missing("targets", "nothing is diverted unless it is named: give each target a name, such as kas, and its addresses")
	}
	for _, p := range rules.Check(targets) {
		path := "targets"
		if p.Target >= 0 {
			path += fmt.Sprintf("[%d]", p.Target)
		}
		if p.Field != "" {
			path += "." + p.Field
		}
		if p.Address >= 0 {
			path += fmt.Sprintf("[%d]", p.Address)
		}
		if p.Field == "name" && targets[p.Target].Name == "" && !d.values[path] {
			p.Text = "missing; the name tells the server what is meant, such as kas"
		}
		d.reject(path, "%s", p.Text)
	}
}

func checkIntercept(d *decoder, a *Agent) {
	if !d.clean("intercept.mode") {
		return // what follows depends on it
	}
	i := &a.Intercept
	chosen := i.Clients.Host || i.Clients.Pods
	if i.Mode == ModeListen {
		if chosen {
			d.reject("intercept.clients", "mode listen diverts nobody, it serves whoever connects to bindAddress; remove clients")
		}
		if i.WhenDown == rules.Direct {
			d.reject("intercept.whenDown", "found \"direct\"; allowed in mode listen: refuse, because bindAddress is the agent's own and nobody else answers there")
		}
		if i.BindAddress == "" {
			d.missing("intercept.bindAddress", "mode listen needs the local address that clients connect to, such as 169.254.77.2")
		}
	} else {
		if !chosen {
			d.missing("intercept.clients", "say whose connections are diverted: host, pods or both")
		}
		if i.BindAddress != "" {
			d.reject("intercept.bindAddress", "only mode listen has a bindAddress, and the mode is %s; remove it or choose mode listen", i.Mode)
		}
	}
	if n, again := twice(i.Uplinks); again {
		d.reject(fmt.Sprintf("intercept.uplinks[%d]", n), "%q is written twice; keep one", i.Uplinks[n])
	}
	for n, t := range a.Targets {
		path := fmt.Sprintf("targets[%d].listen", n)
		switch {
		case i.Mode == ModeListen && t.Listen == 0:
			d.reject(path, "missing; mode listen needs the local port that leads to target %q", t.Name)
		case i.Mode != ModeListen && t.Listen != 0:
			d.reject(path, "target %q has a local port, which only mode listen opens, and the mode is %s; remove it or choose mode listen", t.Name, i.Mode)
		}
	}
}

func checkGuard(d *decoder, a *Agent) {
	var known []string
	for _, t := range append(rules.Expand(a.Targets), a.Targets...) {
		known = append(known, t.Name)
	}
	for i := range a.Guard.Rules {
		r, path := &a.Guard.Rules[i], fmt.Sprintf("guard.rules[%d]", i)
		if !d.values[path+".action"] {
			d.reject(path+".action", "missing; allowed: allow, deny")
		}
		if len(r.Prefixes)+len(r.UIDs)+len(r.Units) == 0 {
			d.reject(path+".clients", "missing; name the clients by prefix, or uids, or units: everybody is 0.0.0.0/0 and ::/0")
		}
		for j, name := range r.Targets {
			if !slices.Contains(known, name) && name != "" {
				d.reject(fmt.Sprintf("%s.targets[%d]", path, j), "no target is called %q; allowed: the names under targets", name)
			}
		}
		r.Targets = expandNames(r.Targets, a.Targets)
	}
}

// expandNames puts the names of the single addresses in the place of the name
// of an exact target.
func expandNames(names []string, targets []rules.Target) []string {
	var out []string
	for _, name := range names {
		i := slices.IndexFunc(targets, func(t rules.Target) bool { return t.Exact && t.Name == name })
		if i < 0 {
			out = append(out, name)
			continue
		}
		for _, t := range rules.Expand(targets[i : i+1]) {
			out = append(out, t.Name)
		}
	}
	return out
}

// maxServers bounds the links that one agent keeps.
const maxServers = 64

func checkLinks(d *decoder, l *Links) {
	if len(l.Servers) == 0 {
		d.missing("links.servers", "name at least one server, HOST:PORT")
	}
	if len(l.Servers) > maxServers {
		d.reject("links.servers", "%d servers; at most %d are allowed", len(l.Servers), maxServers)
	}
	if i, again := twice(l.Servers); again && l.Servers[i] != "" {
		d.reject(fmt.Sprintf("links.servers[%d]", i), "%s is written twice; keep one", l.Servers[i])
	}
}

// checkIdentity wants the process's own certificate, which both binaries need.
func checkIdentity(d *decoder, i *Identity) {
	const hint = "; `kasway-server certs` makes one for a trial"
	if i.Certificate == "" {
		d.missing("identity.certificate", "name the file with this process's certificate"+hint)
	}
	if i.Key == "" {
		d.missing("identity.key", "name the file with the certificate's private key"+hint)
	}
}
