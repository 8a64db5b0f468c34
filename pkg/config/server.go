package config

import "time"

// Server is /etc/kasway/server.yaml with its defaults filled in and every
// value checked.
type Server struct {
	Listen    Listen
	Identity  Identity // CA verifies agents
	Policy    Policy
	Upstreams []Upstream
	Observe   Observe
}

// Listen names the server's own listeners.
type Listen struct {
	Agents string // host:port agents connect to
	// InsecureAgents lets agents in without any proof of who they are.
	InsecureAgents bool
}

// Policy says who may reach what; nothing is allowed that it does not name.
type Policy struct {
	// AllowedDestinations are "host:port" that every identified agent may
	// reach under that name; the first also answers to the name kas where no
	// upstream is called so.
	AllowedDestinations []string
	// Agents grants targets to single identities.
	Agents []Grant
}

// Grant allows an identity (exact, or a prefix ending in *) some targets by
// name; "*" is every upstream and allowed destination.
type Grant struct {
	Identity string
	Targets  []string
}

// Upstream is a named group of equivalent kube-apiservers.
type Upstream struct {
	Name      string
	Addresses []string // host:port, nearest first
	// DialTimeout bounds one attempt.
	DialTimeout time.Duration
}
