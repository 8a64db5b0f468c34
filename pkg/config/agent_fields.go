package config

import (
	"slices"
	"time"

	"github.com/kasway/kasway/pkg/rules"
)

// The modes of interception.
const (
	ModeAuto     = "auto" // the first of ebpf, nft and iptables that works here
	ModeEBPF     = "ebpf"
	ModeNFT      = "nft"
	ModeIPTables = "iptables"
	ModeTPROXY   = "tproxy"
	ModeListen   = "listen"
)

func agentDefaults() Agent {
	return Agent{
		Intercept: Intercept{
			Mode:            ModeAuto,
			WhenDown:        rules.Refuse,
			WhenUnreachable: WhenUnreachableHold,
			Hold:            5 * time.Second,
			Grace:           time.Minute,
			GraceSpread:     30 * time.Second,
			NodeIPv4:        "169.254.77.1",
			Cgroup:          "auto",
			MaxConnections:  4096,
			StateDir:        "/var/lib/kasway",
			ResolveInterval: rules.DefaultResolveInterval,
		},
		Observe: Observe{
			Address:     "127.0.0.1:8094",
			AdminSocket: "/run/kasway/agent.sock",
			LogLevel:    "info",
			LogFormat:   "auto",
		},
	}
}

func agentFields(a *Agent) fields {
	identity := identityFields(&a.Identity)
	identity["name"] = text(&a.Identity.Name, display)
	return fields{
		"targets":   list(&a.Targets, targetShape),
		"intercept": object(interceptFields(&a.Intercept)),
		"guard":     object(fields{"rules": list(&a.Guard.Rules, guardRuleShape)}),
		"links": object(fields{
			"servers":    list(&a.Links.Servers, func(s *string) shape { return text(s, hostPort) }),
			"serverName": text(&a.Links.ServerName, optional(serverName)),
		}),
		"identity": object(identity),
		"observe":  object(observeFields(&a.Observe)),
		"egress":   reserved("this section is kept for the connections from the kube-apiserver to pods and nodes, which this version does not carry; remove it"),
	}
}

func targetShape(t *rules.Target) shape {
	return object(fields{
		"name":      text(&t.Name, named),
		"addresses": list(&t.Addresses, func(a *rules.Address) shape { return text(a, rules.ParseAddress) }),
		"exact":     boolean(&t.Exact),
		"listen":    port(&t.Listen),
	})
}

func interceptFields(i *Intercept) fields {
	return fields{
		"mode":            text(&i.Mode, mode),
		"clients":         clients(&i.Clients),
		"whenDown":        text(&i.WhenDown, oneOf(rules.Refuse, rules.Direct)),
		"whenUnreachable": text(&i.WhenUnreachable, oneOf(WhenUnreachableHold, WhenUnreachableRefuse)),
		"hold":            duration(&i.Hold, 0, time.Minute),
		"grace":           duration(&i.Grace, 0, time.Hour),
		"graceSpread":     duration(&i.GraceSpread, 0, time.Hour),
		"bindAddress":     text(&i.BindAddress, localAddress),
		"nodeAddresses": object(fields{
			"ipv4": text(&i.NodeIPv4, nodeAddress(false)),
			"ipv6": text(&i.NodeIPv6, or("auto", "", nodeAddress(true))),
		}),
		"uplinks":         list(&i.Uplinks, func(s *string) shape { return text(s, interfaceName) }),
		"cgroup":          text(&i.Cgroup, or("auto", "auto", absolutePath)),
		"maxConnections":  number(&i.MaxConnections, 1, 1_000_000),
		"stateDir":        text(&i.StateDir, absolutePath),
		"resolveInterval": duration(&i.ResolveInterval, time.Second, 24*time.Hour),
	}
}

func guardRuleShape(r *GuardRule) shape {
	return object(fields{
		"action": text(&r.Allow, func(s string) (bool, error) {
			action, err := oneOf("allow", "deny")(s)
			return action == "allow", err
		}),
		"clients": list(&r.Prefixes, func(s *string) shape { return text(s, clientPrefix) }),
		"uids":    list(&r.UIDs, func(u *uint32) shape { return number(u, 0, 1<<32-2) }),
		"units":   list(&r.Units, func(s *string) shape { return text(s, unitName) }),
		"targets": list(&r.Targets, func(s *string) shape { return text(s, named) }),
	})
}

func mode(s string) (string, error) {
	return oneOf(ModeAuto, ModeEBPF, ModeNFT, ModeIPTables, ModeTPROXY, ModeListen)(s)
}

// clients reads a list of words into a set.
func clients(dst *rules.Clients) shape {
	var words []string
	s := list(&words, func(w *string) shape { return text(w, oneOf("host", "pods")) })
	read := s.read
	s.read = func(d *decoder, v value) {
		read(d, v)
		*dst = rules.Clients{Host: slices.Contains(words, "host"), Pods: slices.Contains(words, "pods")}
	}
	return s
}

// identityFields are those of both binaries.
func identityFields(i *Identity) fields {
	return fields{
		"certificate": text(&i.Certificate, filePath),
		"key":         text(&i.Key, filePath),
		"ca":          text(&i.CA, filePath),
	}
}

// observeFields are those of both binaries.
func observeFields(o *Observe) fields {
	return fields{
		"address":     text(&o.Address, optional(listenAddress)),
		"adminSocket": text(&o.AdminSocket, optional(socketPath)),
		"log": object(fields{
			"level":  text(&o.LogLevel, oneOf("debug", "info", "warn", "error")),
			"format": text(&o.LogFormat, oneOf("auto", "text", "json")),
		}),
	}
}
