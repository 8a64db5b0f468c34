package stories

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

var consoleBlock = regexp.MustCompile("(?s)```console\n(.*?)```")

// shell runs a line as root of the node would, with the names that pages use:
// what agents keep is the scene's, not the machine's.
func (s *scene) shell(line string) *netns.Cmd {
	const view = `for d in run var/lib etc; do mount --bind "$0/$d" /$d || exit 99; done; PATH="$1:$PATH"; exec sh -c "exec $2"`
	return s.Node.Command("unshare", "--mount", "sh", "-c", view, s.Dir, bin, line).Cgroup(netns.AgentUnit).BPFFS()
}

// says is what each command of the page must print.
func (s *scene) says() map[string][]string {
	return map[string][]string{
		"kasway-agent check --config /etc/kasway/agent.yaml":         {"ebpf would be used", "NetworkPolicy, ebpf", "handshake in"},
		"kasway-agent check --config /etc/kasway/agent.yaml -o json": {`"need": "mode ebpf"`},
		"kasway-agent status":          {"ebpf, when down: refuse", "attached to " + s.NodeCgroup(), "/sys/fs/bpf/kasway/"},
		"kasway-agent rules --running": {"10.96.0.1"},
		"ls /sys/fs/bpf/kasway":        {"\n"},
		"nft list tables":              nil,
		"ip address show dev lo":       {"169.254.77.1/32"},
		"ip rule show":                 {"lookup main"},
		"kasway-agent cleanup":         nil,
	}
}

// The commands of docs/interception.md do what the page says, in its order.
func TestCommandsOfThePage(t *testing.T) {
	t.Parallel()
	s := checkScene(t, netns.Spec{})
	s.pageFiles(t)
	var log stack.Log
	agent := s.shell("kasway-agent run --config /etc/kasway/agent.yaml")
	agent.Stdout, agent.Stderr = &log, &log
	if err := agent.Start(); err != nil {
		t.Fatal(err)
	}
	run := func(line string) (code int, out string) {
		t.Helper()
		code, out, err := stack.ExitOf(s.shell(line))
		if err != nil {
			t.Fatal(err)
		}
		return code, out
	}
	if err := netns.Poll(3*patience, func() error {
		if code, out := run("kasway-agent status --ready"); code != 0 {
			return errors.New(out)
		}
		return nil
	}); err != nil {
		t.Fatalf("%v\n%s", err, log.String())
	}
	page, err := os.ReadFile("../../docs/interception.md")
	if err != nil {
		t.Fatal(err)
	}
	says := s.says()
	for _, block := range consoleBlock.FindAllStringSubmatch(string(page), -1) {
		for line := range strings.Lines(block[1]) {
			command, ok := strings.CutPrefix(strings.TrimSpace(line), "# ")
			texts, known := says[command]
			if !ok || !known {
				t.Errorf("nobody knows what %q shall print", line)
				continue
			}
			delete(says, command)
			code, out := run(command)
			if command == "kasway-agent cleanup" {
				if code == 0 {
					t.Errorf("cleanup does not refuse while an agent runs: %s", out)
				}
				if err := errors.Join(agent.Signal(syscall.SIGTERM), agent.Wait()); err != nil {
					t.Errorf("the agent, asked to stop: %v\n%s", err, log.String())
				}
				code, out = run(command)
			}
			if code != 0 {
				t.Errorf("%s: exit code %d:\n%s", command, code, out)
			}
			for _, text := range texts {
				if !strings.Contains(out, text) {
					t.Errorf("%s does not say %q:\n%s", command, text, out)
				}
			}
		}
	}
	for command := range says {
		t.Errorf("the page has no command %q", command)
	}
	if code, out := run("ls /sys/fs/bpf/kasway"); code == 0 {
		t.Errorf("pins are left: %s", out)
	}
	if _, out := run("ip address show dev lo"); strings.Contains(out, "169.254.77.1") {
		t.Errorf("the address is left: %s", out)
	}
}

// pageFiles are those that the page's commands name.
func (s *scene) pageFiles(t *testing.T) {
	t.Helper()
	for _, dir := range []string{"run", "var/lib", "etc/kasway"} {
		if err := os.MkdirAll(filepath.Join(s.Dir, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	var targets []string
	for _, a := range []string{svc4.String(), svc6.String(), kas4.String(), kas6.String()} {
		targets = append(targets, `"`+a+`"`)
	}
	s.file(t, "etc/kasway/agent.yaml", `apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
targets:
- {name: kas, addresses: [`+strings.Join(targets, ", ")+`]}
intercept: {mode: auto, clients: [host, pods], cgroup: `+s.NodeCgroup()+`}
links: {servers: ["`+s.At.String()+`"]}
identity: {certificate: `+s.Path("pki/agent-node.crt")+`, key: `+s.Path("pki/agent-node.key")+`, ca: `+s.Path("pki/ca.crt")+`}
`)
}
