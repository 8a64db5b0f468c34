package config

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"
)

// ServerPath is the server's configuration if no other is named.
const ServerPath = "/etc/kasway/server.yaml"

// ServerOverrides are the server's flags: --config, and what overrides the file.
type ServerOverrides struct{ *overrides }

// ServerFlags adds the server's flags to fs. Load with LoadServer after fs has
// been parsed.
func ServerFlags(fs *pflag.FlagSet) *ServerOverrides {
	return &ServerOverrides{serverDocument().register(fs)}
}

// LoadServer reads the file that o names, or ServerPath if that exists, and
// lets the flags override it. Errors are an *Error.
func LoadServer(o *ServerOverrides) (Server, error) { return serverDocument().load(o.overrides) }

// ParseServer reads data as the server's configuration, called name in
// messages. Errors are an *Error.
func ParseServer(name string, data []byte) (Server, error) {
	return serverDocument().parse(name, data, nil)
}

func serverDocument() *document[Server] {
	return &document[Server]{
		kind:     "ServerConfig",
		path:     ServerPath,
		defaults: serverDefaults,
		fields:   serverFields,
		flags:    serverFlags(),
		check:    checkServer,
	}
}

func serverFlags() []flag[Server] {
	return []flag[Server]{
		{name: "listen", path: "listen.agents", value: "address", def: ":8091", usage: "where agents connect to"},
		{name: "insecure-agents", path: "listen.insecureAgents", value: "bool", def: "false", usage: "let agents in without any proof of who they are"},
		{name: "cert", path: "identity.certificate", value: "file", usage: "the server's certificate"},
		{name: "key", path: "identity.key", value: "file", usage: "the certificate's private key, mode 0600"},
		{name: "ca", path: "identity.ca", value: "file", usage: "the CA that signs the agents' certificates"},
		{name: "allowed-destination", path: "policy.allowedDestinations", value: "host:port", usage: "what every identified agent may reach; repeatable; the first is the target kas if no upstream is called so"},
		{name: "grant", path: "policy.agents", value: "grant", shape: grantFlags,
			usage: "what single agents may reach, repeatable: IDENTITY=TARGET,...; replaces the file's policy.agents"},
		{name: "upstream", path: "upstreams", value: "upstream", shape: upstreamFlags,
			usage: "a named group of kube-apiservers, repeatable: NAME=HOST:PORT,... nearest first; replaces the file's upstreams"},
		{name: "observe-address", path: "observe.address", value: "address", def: "127.0.0.1:8095", usage: "where /livez, /readyz and /metrics are served; empty: nowhere"},
		{name: "admin-socket", path: "observe.adminSocket", value: "path", def: "/run/kasway/server.sock", usage: "UNIX socket with status and pprof; empty: none"},
		{name: "log-level", path: "observe.log.level", value: "level", def: "info", usage: "debug, info, warn or error"},
		{name: "log-format", path: "observe.log.format", value: "format", def: "auto", usage: "auto (text on a terminal, else JSON), text or json"},
	}
}

func upstreamFlags(s *Server) shape {
	return list(&s.Upstreams, func(u *Upstream) shape { return text(u, upstreamFlag) })
}

// upstreamFlag reads NAME=HOST:PORT,HOST:PORT.
func upstreamFlag(s string) (Upstream, error) {
	name, addresses, err := group(s)
	u := Upstream{Name: name, DialTimeout: defaultDialTimeout}
	for _, text := range addresses {
		if err != nil {
			break
		}
		text, err = hostPort(text)
		u.Addresses = append(u.Addresses, text)
	}
	return u, err
}

func grantFlags(s *Server) shape {
	return list(&s.Policy.Agents, func(g *Grant) shape { return text(g, grantFlag) })
}

// grantFlag reads IDENTITY=TARGET,TARGET; an identity may hold a = itself.
func grantFlag(s string) (Grant, error) {
	i := strings.LastIndexByte(s, '=')
	if i < 0 {
		return Grant{}, fmt.Errorf("%q: not IDENTITY=TARGET,TARGET, such as *=kas", s)
	}
	identity, err := grantIdentity(s[:i])
	g := Grant{Identity: identity}
	for _, target := range strings.Split(s[i+1:], ",") {
		if err != nil {
			break
		}
		target, err = grantTarget(target)
		g.Targets = append(g.Targets, target)
	}
	return g, err
}
