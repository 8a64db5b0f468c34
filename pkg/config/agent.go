package config

import (
	"time"

	"github.com/kasway/kasway/pkg/rules"
)

// Agent is /etc/kasway/agent.yaml with its defaults filled in and every value
// checked.
type Agent struct {
	// Targets are expanded: those with exact: true are one target per address,
	// and Guard names them so.
	Targets   []rules.Target
	Intercept Intercept
	Guard     Guard
	Links     Links
	Identity  Identity
	Observe   Observe
}

// Intercept says how connections are diverted.
type Intercept struct {
	// Mode is auto, ebpf, nft, iptables, tproxy or listen.
	Mode    string
	Clients rules.Clients
	// WhenDown is what clients meet while the agent is dead or frozen.
	WhenDown rules.WhenDown
	// WhenUnreachable is what clients meet while the agent lives and cannot
	// carry: WhenUnreachableHold or WhenUnreachableRefuse.
	WhenUnreachable string
	// Hold bounds how long a taken connection waits for a way.
	Hold time.Duration
	// Grace is how long what is carried stays untouched when another agent has
	// taken over, and GraceSpread the time after it over which the rest is reset.
	Grace, GraceSpread time.Duration
	// BindAddress is the managed local address of mode listen.
	BindAddress string
	// NodeIPv4 and NodeIPv6 are the node-local addresses pods are diverted
	// to; an empty NodeIPv6 is a random ULA kept in StateDir.
	NodeIPv4, NodeIPv6 string
	// Uplinks are the interfaces to other hosts, whose peers are refused;
	// empty: found out from the routes.
	Uplinks []string
	// Cgroup is auto or the path of a cgroup-2 directory: whose processes are
	// diverted in mode ebpf, and below which clients are told apart in every mode.
	Cgroup string
	// MaxConnections bounds connections taken and not yet ended.
	MaxConnections int
	// StateDir keeps what must outlive the process.
	StateDir string
	// ResolveInterval is how often the targets' host names are resolved again.
	ResolveInterval time.Duration
}

// The answers of Intercept.WhenUnreachable.
const (
	WhenUnreachableHold   = "hold"
	WhenUnreachableRefuse = "refuse"
)

// Guard is the agent's own policy: rules in order, the first that matches
// decides, and no match allows.
type Guard struct{ Rules []GuardRule }

// GuardRule matches a client by any of its prefixes, uids or units, towards any
// of its targets (none named: every target).
type GuardRule struct {
	Allow    bool
	Prefixes []string
	UIDs     []uint32
	Units    []string
	Targets  []string
}

// Links says which servers the agent keeps links to.
type Links struct {
	Servers []string // host:port
	// ServerName overrides the name the server's certificate is verified
	// against; empty: the host of each server.
	ServerName string
}

// Identity names the files of a process's credentials.
type Identity struct {
	Certificate, Key, CA string
	// Name is the node's name as the server's operators see it, for people;
	// empty: the host name. It grants nothing.
	Name string
}

// Observe says where operators look.
type Observe struct {
	// Address of /livez, /readyz and /metrics; empty: none.
	Address string
	// AdminSocket is a UNIX socket, mode 0600, with pprof and status.
	AdminSocket string
	LogLevel    string // debug, info, warn, error
	LogFormat   string // auto, text, json
}
