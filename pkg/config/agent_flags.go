package config

import (
	"fmt"
	"strings"

	"github.com/spf13/pflag"

	"github.com/kasway/kasway/pkg/rules"
)

// AgentPath is the agent's configuration if no other is named.
const AgentPath = "/etc/kasway/agent.yaml"

// AgentOverrides are the agent's flags: --config, and what overrides the file.
type AgentOverrides struct{ *overrides }

// AgentFlags adds the agent's flags to fs. Load with LoadAgent after fs has
// been parsed.
func AgentFlags(fs *pflag.FlagSet) *AgentOverrides {
	return &AgentOverrides{agentDocument().register(fs)}
}

// LoadAgent reads the file that o names, or AgentPath if that exists, and lets
// the flags override it. Errors are an *Error.
func LoadAgent(o *AgentOverrides) (Agent, error) { return agentDocument().load(o.overrides) }

// ParseAgent reads data as the agent's configuration, called name in messages.
// Errors are an *Error.
func ParseAgent(name string, data []byte) (Agent, error) {
	return agentDocument().parse(name, data, nil)
}

func agentDocument() *document[Agent] {
	return &document[Agent]{
		kind:     "AgentConfig",
		path:     AgentPath,
		defaults: agentDefaults,
		fields:   agentFields,
		flags:    agentFlags(),
		check:    checkAgent,
	}
}

func agentFlags() []flag[Agent] {
	return []flag[Agent]{
		{name: "target", path: "targets", value: "target", shape: targetFlags,
			usage: "what is diverted, repeatable: NAME=ADDRESS,... or in mode listen LPORT:HOST:PORT; replaces the file's targets"},
		{name: "mode", path: "intercept.mode", value: "mode", def: "auto", usage: "how connections are diverted: auto, nft, iptables or listen"},
		{name: "clients", path: "intercept.clients", value: "list", usage: "whose connections are diverted: host, pods or host,pods"},
		{name: "when-down", path: "intercept.whenDown", value: "answer", def: "refuse", usage: "what clients meet while the agent is dead: refuse or direct"},
		{name: "when-unreachable", path: "intercept.whenUnreachable", value: "answer", def: "hold", usage: "what clients meet while nothing can be carried: hold or refuse"},
		{name: "hold", path: "intercept.hold", value: "duration", def: "5s", usage: "how long a taken connection waits for a way"},
		{name: "grace", path: "intercept.grace", value: "duration", def: "1m0s", usage: "how long carried connections are left alone once another agent has taken over"},
		{name: "grace-spread", path: "intercept.graceSpread", value: "duration", def: "30s", usage: "the time after that over which the rest of them is reset, one by one"},
		{name: "bind-address", path: "intercept.bindAddress", value: "ip", usage: "local address of mode listen, managed by the agent"},
		{name: "node-ipv4", path: "intercept.nodeAddresses.ipv4", value: "ip", def: "169.254.77.1", usage: "node-local address that pods are diverted to"},
		{name: "node-ipv6", path: "intercept.nodeAddresses.ipv6", value: "ip", def: "auto", usage: "the same for IPv6; auto: a random one, kept in the state directory"},
		{name: "uplink", path: "intercept.uplinks", value: "interface", usage: "interface to other hosts, whose peers are refused; repeatable (default: found out from the routes)"},
		{name: "cgroup", path: "intercept.cgroup", value: "path", def: "auto", usage: "cgroup whose processes are diverted, in mode ebpf"},
		{name: "max-connections", path: "intercept.maxConnections", value: "number", def: "4096", usage: "bound of the connections taken and not yet ended"},
		{name: "state-dir", path: "intercept.stateDir", value: "directory", def: "/var/lib/kasway", usage: "keeps what must outlive the process"},
		{name: "resolve-interval", path: "intercept.resolveInterval", value: "duration", def: "30s", usage: "how often the targets' host names are resolved again"},
		{name: "server", path: "links.servers", value: "host:port", usage: "a server to keep a link to; repeatable"},
		{name: "server-name", path: "links.serverName", value: "name", usage: "verify the server's certificate against this name (default: the host of each server)"},
		{name: "cert", path: "identity.certificate", value: "file", usage: "the agent's certificate"},
		{name: "key", path: "identity.key", value: "file", usage: "the certificate's private key, mode 0600"},
		{name: "ca", path: "identity.ca", value: "file", usage: "the CA that the server's certificate is verified against"},
		{name: "node-name", path: "identity.name", value: "name", usage: "the node's name as operators of the server see it (default: the host name)"},
		{name: "observe-address", path: "observe.address", value: "address", def: "127.0.0.1:8094", usage: "where /livez, /readyz and /metrics are served; empty: nowhere"},
		{name: "admin-socket", path: "observe.adminSocket", value: "path", def: "/run/kasway/agent.sock", usage: "UNIX socket with status and pprof; empty: none"},
		{name: "log-level", path: "observe.log.level", value: "level", def: "info", usage: "debug, info, warn or error"},
		{name: "log-format", path: "observe.log.format", value: "format", def: "auto", usage: "auto (text on a terminal, else JSON), text or json"},
	}
}

func targetFlags(a *Agent) shape {
	return list(&a.Targets, func(t *rules.Target) shape { return text(t, targetFlag) })
}

// targetFlag reads LPORT:HOST:PORT, or NAME=ADDRESS,ADDRESS.
func targetFlag(s string) (rules.Target, error) {
	if !strings.Contains(s, "=") {
		t, err := rules.ParseTarget(s)
		if err != nil {
			err = fmt.Errorf("%w; allowed as well: NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443", err)
		}
		return t, err
	}
	name, addresses, err := group(s)
	if err != nil {
		return rules.Target{}, err
	}
	t := rules.Target{Name: name}
	for _, text := range addresses {
		a, err := rules.ParseAddress(text)
		if err != nil {
			return rules.Target{}, err
		}
		t.Addresses = append(t.Addresses, a)
	}
	return t, nil
}

// group splits NAME=MEMBER,MEMBER.
func group(s string) (name string, members []string, err error) {
	name, rest, ok := strings.Cut(s, "=")
	if !ok || rest == "" {
		return "", nil, fmt.Errorf("%q: not NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443,10.96.0.2:443", s)
	}
	return name, strings.Split(rest, ","), rules.CheckName(name)
}
