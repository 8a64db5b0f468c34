package config

import (
	"fmt"
	"strings"
	"time"
)

// defaultDialTimeout is long enough for one lost SYN (repeated after 1 s), and
// leaves the next address time within what an agent holds a connection for.
const defaultDialTimeout = 2 * time.Second

func serverDefaults() Server {
	return Server{
		Listen: Listen{Agents: ":8091"},
		Observe: Observe{
			Address:     "127.0.0.1:8095",
			AdminSocket: "/run/kasway/server.sock",
			LogLevel:    "info",
			LogFormat:   "auto",
		},
	}
}

func serverFields(s *Server) fields {
	return fields{
		"listen": object(fields{
			"agents":         text(&s.Listen.Agents, listenAddress),
			"insecureAgents": boolean(&s.Listen.InsecureAgents),
		}),
		"identity": object(identityFields(&s.Identity)),
		"policy": object(fields{
			"allowedDestinations": list(&s.Policy.AllowedDestinations, func(s *string) shape { return text(s, hostPort) }),
			"agents":              list(&s.Policy.Agents, grantShape),
		}),
		"upstreams": list(&s.Upstreams, upstreamShape),
		"observe":   object(observeFields(&s.Observe)),
		"egress":    reserved("this section is kept for the connections that a kube-apiserver opens through the server, which this version does not carry; remove it"),
	}
}

func grantShape(g *Grant) shape {
	return object(fields{
		"identity": text(&g.Identity, grantIdentity),
		"targets":  list(&g.Targets, func(s *string) shape { return text(s, grantTarget) }),
	})
}

func upstreamShape(u *Upstream) shape {
	u.DialTimeout = defaultDialTimeout
	return object(fields{
		"name":        text(&u.Name, named),
		"addresses":   list(&u.Addresses, func(s *string) shape { return text(s, hostPort) }),
		"dialTimeout": duration(&u.DialTimeout, 100*time.Millisecond, time.Minute),
	})
}

// grantIdentity is a whole identity, or its beginning and a star.
func grantIdentity(s string) (string, error) {
	if s == "" || len(s) > 1024 || strings.Contains(strings.TrimSuffix(s, "*"), "*") {
		return "", fmt.Errorf("found %.64q; allowed: an identity, or its beginning and one * at the end", s)
	}
	return s, nil
}

// grantTarget is every target, an upstream's name or HOST:PORT.
func grantTarget(s string) (string, error) {
	if s == "*" {
		return s, nil
	}
	if strings.Contains(s, ":") {
		return hostPort(s)
	}
	return named(s)
}
