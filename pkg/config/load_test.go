package config

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/pflag"

	"github.com/kasway/kasway/pkg/rules"
)

// minimal is the least that an agent starts with.
const minimal = `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
targets: [{name: kas, addresses: ["10.96.0.1:443"]}]
intercept: {clients: [host]}
links: {servers: ["kasway.example:8091"]}
identity: {certificate: a.crt, key: a.key, ca: ca.crt}
`

// comparable lets cmp look at addresses.
var comparable = cmp.Comparer(func(a, b rules.Address) bool { return a == b })

func address(t *testing.T, s string) rules.Address {
	t.Helper()
	a, err := rules.ParseAddress(s)
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// loadAgent is what a command does with args; path takes the place of the
// default file, whatever this machine has.
func loadAgent(t *testing.T, path string, args ...string) (Agent, error) {
	t.Helper()
	doc := agentDocument()
	doc.path = path
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	o := doc.register(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return doc.load(o)
}

// loadServer is what a command does with args, where there is no default file.
func loadServer(t *testing.T, args ...string) (Server, error) {
	t.Helper()
	doc := serverDocument()
	doc.path = filepath.Join(t.TempDir(), "none.yaml")
	fs := pflag.NewFlagSet("server", pflag.ContinueOnError)
	o := doc.register(fs)
	if err := fs.Parse(args); err != nil {
		t.Fatal(err)
	}
	return doc.load(o)
}

func write(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestParseAgent(t *testing.T) {
	got, err := ParseAgent("agent.yaml", []byte(minimal))
	if err != nil {
		t.Fatal(err)
	}
	want := Agent{
		Targets: []rules.Target{{Name: "kas", Addresses: []rules.Address{address(t, "10.96.0.1:443")}}},
		Intercept: Intercept{
			Mode: "auto", Clients: rules.Clients{Host: true}, WhenDown: rules.Refuse, WhenUnreachable: "hold", Hold: 5 * time.Second, Grace: time.Minute, GraceSpread: 30 * time.Second,
			NodeIPv4: "169.254.77.1", Cgroup: "auto", MaxConnections: 4096, StateDir: "/var/lib/kasway", ResolveInterval: 30 * time.Second,
		},
		Links:    Links{Servers: []string{"kasway.example:8091"}},
		Identity: Identity{Certificate: "a.crt", Key: "a.key", CA: "ca.crt"},
		Observe:  Observe{Address: "127.0.0.1:8094", AdminSocket: "/run/kasway/agent.sock", LogLevel: "info", LogFormat: "auto"},
	}
	if diff := cmp.Diff(want, got, comparable); diff != "" {
		t.Error(diff)
	}
}

func TestParseAgentEverything(t *testing.T) {
	got, err := ParseAgent("agent.yaml", []byte(`apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
targets:
- {name: kas, addresses: ["[FD00:96::1]:443", "KAS.example:6443", 10.9.0.0/16:6443]}
- {name: others, exact: true, addresses: [10.0.0.1:443, "[fd00::2]:443"]}
intercept:
  mode: nft
  clients: [pods, host]
  whenDown: direct
  whenUnreachable: refuse
  hold: 0s
  grace: 0s
  graceSpread: 2m
  nodeAddresses: {ipv4: 169.254.78.1, ipv6: "FD00:6b77::2"}
  uplinks: [eth0, bond0.7]
  cgroup: /sys/fs/cgroup/test/
  maxConnections: 10
  stateDir: /tmp/x/
  resolveInterval: 1m30s
guard:
  rules:
  - {action: allow, clients: [10.244.3.7, "fd00::/64", 0.0.0.0/0, "::/0"]}
  - {action: deny, uids: [0, 4294967294], targets: [others, kas]}
  - {action: deny, units: [kubelet.service, 'getty@tty1.service', 'a\x2db.scope']}
links: {servers: ["a.example:1", "[FD00::5]:2", 10.0.0.9:3], serverName: kasway.example}
identity: {certificate: a.crt, key: a.key, ca: ca.crt, name: node-1}
observe: {address: "", adminSocket: "", log: {level: debug, format: json}}
`))
	if err != nil {
		t.Fatal(err)
	}
	want := Agent{
		Targets: []rules.Target{
			{Name: "kas", Addresses: []rules.Address{address(t, "[fd00:96::1]:443"), address(t, "kas.example:6443"), {Prefix: netip.MustParsePrefix("10.9.0.0/16"), Port: 6443}}},
			{Name: "10.0.0.1:443", Addresses: []rules.Address{address(t, "10.0.0.1:443")}},
			{Name: "[fd00::2]:443", Addresses: []rules.Address{address(t, "[fd00::2]:443")}},
		},
		Intercept: Intercept{
			Mode: "nft", Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Direct, WhenUnreachable: "refuse",
			NodeIPv4: "169.254.78.1", NodeIPv6: "fd00:6b77::2", Uplinks: []string{"eth0", "bond0.7"}, Cgroup: "/sys/fs/cgroup/test",
			MaxConnections: 10, GraceSpread: 2 * time.Minute, StateDir: "/tmp/x", ResolveInterval: 90 * time.Second,
		},
		Guard: Guard{Rules: []GuardRule{
			{Allow: true, Prefixes: []string{"10.244.3.7/32", "fd00::/64", "0.0.0.0/0", "::/0"}},
			{UIDs: []uint32{0, 4294967294}, Targets: []string{"10.0.0.1:443", "[fd00::2]:443", "kas"}},
			{Units: []string{"kubelet.service", "getty@tty1.service", `a\x2db.scope`}},
		}},
		Links:    Links{Servers: []string{"a.example:1", "[fd00::5]:2", "10.0.0.9:3"}, ServerName: "kasway.example"},
		Identity: Identity{Certificate: "a.crt", Key: "a.key", CA: "ca.crt", Name: "node-1"},
		Observe:  Observe{LogLevel: "debug", LogFormat: "json"},
	}
	if diff := cmp.Diff(want, got, comparable); diff != "" {
		t.Error(diff)
	}
}

func TestParseAgentModeListen(t *testing.T) {
	got, err := ParseAgent("agent.yaml", []byte(strings.NewReplacer(
		"{clients: [host]}", `{mode: listen, bindAddress: "FD00::7"}`,
		`{name: kas, addresses: ["10.96.0.1:443"]}`, "{name: kas, listen: 443}",
	).Replace(minimal)))
	if err != nil {
		t.Fatal(err)
	}
	if got.Intercept.BindAddress != "fd00::7" || got.Targets[0].Listen != 443 || got.Intercept.Clients != (rules.Clients{}) {
		t.Errorf("%+v", got)
	}
}

func TestAgentFlagsAlone(t *testing.T) {
	none := filepath.Join(t.TempDir(), "none.yaml")
	got, err := loadAgent(t, none, "--mode", "listen", "--bind-address=169.254.77.2", "--target=6443:localhost:6443", "--target", "443:[fd00::1]:6443",
		"--server", "a.example:1", "--server=b.example:2,c.example:3", "--cert=a.crt", "--key=a.key", "--ca=ca.crt", "--server-name=kasway", "--observe-address=")
	if err != nil {
		t.Fatal(err)
	}
	want := agentDefaults()
	want.Intercept.Mode, want.Intercept.BindAddress = "listen", "169.254.77.2"
	want.Targets = []rules.Target{
		{Name: "localhost:6443", Listen: 6443, Addresses: []rules.Address{address(t, "localhost:6443")}},
		{Name: "[fd00::1]:6443", Listen: 443, Addresses: []rules.Address{address(t, "[fd00::1]:6443")}},
	}
	want.Links = Links{Servers: []string{"a.example:1", "b.example:2", "c.example:3"}, ServerName: "kasway"}
	want.Identity = Identity{Certificate: "a.crt", Key: "a.key", CA: "ca.crt"}
	want.Observe.Address = ""
	if diff := cmp.Diff(want, got, comparable); diff != "" {
		t.Error(diff)
	}
	got, err = loadAgent(t, none, "--clients=host,pods", "--target", "kas=10.96.0.1:443,[fd00:96::1]:443", "--server=a:1", "--cert=a", "--key=b", "--ca=c", "--hold=1s", "--grace=2s", "--grace-spread=3s", "--max-connections=7")
	if err != nil {
		t.Fatal(err)
	}
	if got.Intercept.Clients != (rules.Clients{Host: true, Pods: true}) || got.Targets[0].Name != "kas" || len(got.Targets[0].Addresses) != 2 ||
		got.Intercept.Hold != time.Second || got.Intercept.Grace != 2*time.Second || got.Intercept.GraceSpread != 3*time.Second || got.Intercept.MaxConnections != 7 {
		t.Errorf("%+v", got)
	}
}

func TestAgentFlagsOverrideFile(t *testing.T) {
	file := write(t, "agent.yaml", minimal)
	got, err := loadAgent(t, "/nonexistent", "-f", file, "--mode=nft", "--target=other=10.0.0.1:443", "--server=other.example:1", "--clients=pods", "--key=other.key")
	if err != nil {
		t.Fatal(err)
	}
	if got.Intercept.Mode != "nft" || len(got.Targets) != 1 || got.Targets[0].Name != "other" || got.Intercept.Clients != (rules.Clients{Pods: true}) {
		t.Errorf("not overridden: %+v", got)
	}
	if diff := cmp.Diff([]string{"other.example:1"}, got.Links.Servers); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(Identity{Certificate: "a.crt", Key: "other.key", CA: "ca.crt"}, got.Identity); diff != "" {
		t.Error(diff)
	}
	// The default file is read where it exists, and no error where it does not.
	if got, err = loadAgent(t, file); err != nil || got.Targets[0].Name != "kas" {
		t.Errorf("the default file: %+v, %v", got, err)
	}
	if _, err = loadAgent(t, file, "-f", file+"x"); err == nil || !strings.HasPrefix(err.Error(), "--config: cannot read") {
		t.Errorf("a file that was asked for and is missing: %v", err)
	}
	if _, err = loadAgent(t, filepath.Dir(file)); err == nil || !strings.HasPrefix(err.Error(), "cannot read the configuration: ") {
		t.Errorf("a default file that cannot be read: %v", err)
	}
}

// What is wrong with a flag names the flag, and what is missing names the flag
// that would set it.
func TestAgentFlagErrors(t *testing.T) {
	file, none := write(t, "agent.yaml", minimal), filepath.Join(t.TempDir(), "none.yaml")
	for _, tc := range []struct {
		args []string
		want string
	}{
		{nil, "targets: missing; nothing is diverted unless it is named: give each target a name, such as kas, and its addresses (or --target)\n" +
			"intercept.clients: missing; say whose connections are diverted: host, pods or both (or --clients)\n" +
			"links.servers: missing; name at least one server, HOST:PORT (or --server)\n" +
			"identity.certificate: missing; name the file with this process's certificate; `kasway-server certs` makes one for a trial (or --cert)\n" +
			"identity.key: missing; name the file with the certificate's private key; `kasway-server certs` makes one for a trial (or --key)\n" +
			"identity.ca: missing; name the file with the CA that the server's certificate is verified against (or --ca)"},
		{[]string{"-f", file, "--mode=bpf", "--when-down", "open", "--hold=5", "--max-connections=x", "--clients=all"},
			"--mode: found \"bpf\"; allowed: auto, ebpf, nft, iptables, tproxy, listen\n" +
				"--clients: found \"all\"; allowed: host, pods\n" +
				"--when-down: found \"open\"; allowed: refuse, direct\n" +
				"--hold: found \"5\"; allowed: a duration with its unit, 0s to 1m, such as 5s\n" +
				"--max-connections: found x; allowed: a whole number, 1-1000000"},
		{[]string{"-f", file, "--target=6443:fd00::1:6443", "--target=6443", "--target=kas=", "--target=KAS=a:1"},
			"--target: \"6443:fd00::1:6443\": cannot tell an IPv6 address from its port; write it in brackets: [fd00::1]:6443; allowed as well: NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443\n" +
				"--target: \"6443\": not LPORT:HOST:PORT; write for example 6443:localhost:6443 or 443:[fd00::1]:6443; allowed as well: NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443\n" +
				"--target: \"kas=\": not NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443,10.96.0.2:443\n" +
				"--target: \"KAS\" is not a name; allowed: 1-253 of a-z 0-9 - . : [ ], beginning with a letter, a digit or ["},
		{[]string{"-f", file, "--target=6443:localhost:6443", "--server=a:1,a:1"},
			"--target: target \"localhost:6443\" has a local port, which only mode listen opens, and the mode is auto; remove it or choose mode listen\n" +
				"--server: a:1 is written twice; keep one"},
		{[]string{"-f", file, "--mode=listen", "--when-down=direct"},
			"agent.yaml:3: targets[0].listen: missing; mode listen needs the local port that leads to target \"kas\"\n" +
				"agent.yaml:4: intercept.clients: mode listen diverts nobody, it serves whoever connects to bindAddress; remove clients\n" +
				"agent.yaml:4: intercept.bindAddress: missing; mode listen needs the local address that clients connect to, such as 169.254.77.2 (or --bind-address)\n" +
				"--when-down: found \"direct\"; allowed in mode listen: refuse, because bindAddress is the agent's own and nobody else answers there"},
	} {
		_, err := loadAgent(t, none, tc.args...)
		got := strings.ReplaceAll(strings.TrimSuffix(lines(t, err), "\n"), filepath.Dir(file)+"/", "")
		if diff := cmp.Diff(strings.Split(tc.want, "\n"), strings.Split(got, "\n")); diff != "" {
			t.Errorf("%q: %s", tc.args, diff)
		}
	}
}

func TestServerFlagsAlone(t *testing.T) {
	got, err := loadServer(t, "--listen=127.0.0.1:0", "--allowed-destination", "localhost:6443", "--allowed-destination=KAS.example.svc:6443,[FD00::1]:6443",
		"--upstream=kas=127.0.0.1:6443,[::1]:6443", "--grant", "spiffe://x/agent/a=b=kas,10.0.0.1:443", "--grant=*=*", "--cert=s.crt", "--key=s.key", "--insecure-agents")
	if err != nil {
		t.Fatal(err)
	}
	want := serverDefaults()
	want.Listen = Listen{Agents: "127.0.0.1:0", InsecureAgents: true}
	want.Identity = Identity{Certificate: "s.crt", Key: "s.key"}
	want.Policy = Policy{
		AllowedDestinations: []string{"localhost:6443", "kas.example.svc:6443", "[fd00::1]:6443"},
		Agents:              []Grant{{Identity: "spiffe://x/agent/a=b", Targets: []string{"kas", "10.0.0.1:443"}}, {Identity: "*", Targets: []string{"*"}}},
	}
	want.Upstreams = []Upstream{{Name: "kas", Addresses: []string{"127.0.0.1:6443", "[::1]:6443"}, DialTimeout: defaultDialTimeout}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

func TestServerFlagErrors(t *testing.T) {
	credentials := []string{"--cert=s.crt", "--key=s.key", "--ca=ca.crt"}
	for _, tc := range []struct {
		args []string
		want string
	}{
		{[]string{"--listen=here", "--insecure-agents=perhaps"}, "--listen: found \"here\"; allowed: IP:PORT, [IPv6]:PORT or :PORT for all addresses\n" +
			"--insecure-agents: found \"perhaps\"; allowed: true or false"},
		{[]string{"--upstream=kas", "--upstream=kas=10.0.0.0/8:1", "--upstream=Kas=a:1"}, "--upstream: \"kas\": not NAME=ADDRESS,ADDRESS, such as kas=10.96.0.1:443,10.96.0.2:443\n" +
			"--upstream: \"10.0.0.0/8:1\" is a prefix; allowed: one host, HOST:PORT\n" +
			"--upstream: \"Kas\" is not a name; allowed: 1-253 of a-z 0-9 - . : [ ], beginning with a letter, a digit or ["},
		{[]string{"--upstream=a=a:1", "--upstream=a=b:1"}, "--upstream: \"a\" is the name of upstream 1 as well; give each its own"},
		{[]string{"--grant=*", "--grant=a*b=*", "--grant=a=B", "--grant=a=etcd"}, "--grant: \"*\": not IDENTITY=TARGET,TARGET, such as *=kas\n" +
			"--grant: found \"a*b\"; allowed: an identity, or its beginning and one * at the end\n" +
			"--grant: \"B\" is not a name; allowed: 1-253 of a-z 0-9 - . : [ ], beginning with a letter, a digit or [\n" +
			"--grant: no upstream is called \"etcd\"; allowed: the names under upstreams, HOST:PORT, *"},
		{[]string{"--allowed-destination=fd00::1:6443"}, "--allowed-destination: \"fd00::1:6443\": cannot tell an IPv6 address from its port; write it in brackets: [fd00::1]:6443"},
	} {
		_, err := loadServer(t, append(tc.args, credentials...)...)
		if diff := cmp.Diff(strings.Split(tc.want, "\n"), strings.Split(strings.TrimSuffix(lines(t, err), "\n"), "\n")); diff != "" {
			t.Errorf("%q: %s", tc.args, diff)
		}
	}
}

// Every flag leads to a field, every default that --help shows is the default,
// and no flag is there twice.
func TestFlagTables(t *testing.T) {
	flagTable(t, agentDocument())
	flagTable(t, serverDocument())
}

func flagTable[T any](t *testing.T, doc *document[T]) {
	names := map[string]bool{"config": true}
	for _, f := range doc.flags {
		if names[f.name] {
			t.Errorf("--%s twice", f.name)
		}
		names[f.name] = true
		c := doc.defaults()
		if s := doc.fields(&c).at(f.path); s.read == nil {
			t.Errorf("--%s leads to %s, which does not exist", f.name, f.path)
			continue
		}
		if f.def == "" {
			continue
		}
		d := newDecoder()
		f.apply(d, doc.fields(&c), &c, &flagValue{texts: []string{f.def}})
		if diff := cmp.Diff(doc.defaults(), c, comparable); diff != "" || d.err() != nil {
			t.Errorf("--%s: %q is not the default: %v %s", f.name, f.def, d.err(), diff)
		}
	}
}

func TestFlagHelp(t *testing.T) {
	fs := pflag.NewFlagSet("agent", pflag.ContinueOnError)
	AgentFlags(fs)
	for _, want := range []string{"-f, --config file", "(default \"/etc/kasway/agent.yaml\")", "--mode mode", "(default auto)", "--target target"} {
		if !strings.Contains(fs.FlagUsages(), want) {
			t.Errorf("--help has no %q:\n%s", want, fs.FlagUsages())
		}
	}
}

// A flag takes the place of what the file says, and of where it says it.
func TestFlagReplacesPlaces(t *testing.T) {
	file := write(t, "agent.yaml", strings.Replace(minimal, `["10.96.0.1:443"]`, "[a:1, b:1]", 1))
	_, err := loadAgent(t, "/nonexistent", "-f", file, "--target=kas=10.0.0.1:443,10.0.0.1:443")
	const want = "--target: 10.0.0.1:443 overlaps 10.0.0.1:443 of the same target; keep one"
	if err == nil || err.Error() != want {
		t.Errorf("got  %v\nwant %s", err, want)
	}
}

func TestBounds(t *testing.T) {
	many := func(n int) string {
		var out []string
		for i := range n {
			out = append(out, fmt.Sprintf("10.0.0.%d:1", i+1))
		}
		return strings.Join(out, ",")
	}
	agent := func(n int) error {
		_, err := ParseAgent("agent.yaml", []byte(strings.Replace(minimal, `"kasway.example:8091"`, many(n), 1)))
		return err
	}
	server := func(n int) error {
		_, err := loadServer(t, "--cert=a", "--key=b", "--ca=c", "--upstream=kas="+many(n))
		return err
	}
	long := func(n int) error {
		_, err := ParseAgent("agent.yaml", []byte(minimal+"# "+strings.Repeat("x", n-len(minimal)-2)))
		return err
	}
	for _, tc := range []struct {
		got  error
		want string
	}{
		{agent(64), ""},
		{agent(65), "agent.yaml:5: links.servers: 65 servers; at most 64 are allowed"},
		{server(64), ""},
		{server(65), "--upstream: 65 addresses; at most 64 are allowed"},
		{long(1 << 20), ""},
		{long(1<<20 + 1), "agent.yaml: 1048577 bytes long; at most 1048576 are read"},
	} {
		if got := fmt.Sprint(tc.got); got != tc.want && (tc.want != "" || tc.got != nil) {
			t.Errorf("got  %s\nwant %s", got, tc.want)
		}
	}
}
