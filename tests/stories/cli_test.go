package stories

import (
	"encoding/json"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// status is what `kasway-agent status -o json` prints.
func (s *scene) status(t *testing.T) (st agent.Status) {
	t.Helper()
	out, err := s.Run("status", "-o", "json", "--admin-socket", s.agent.Socket)
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal([]byte(out), &st); err != nil {
		t.Fatal(err)
	}
	return st
}

// exits fails the test unless the command exits with code and says every text.
func exits(t *testing.T, s *scene, code int, binary string, args []string, texts ...string) {
	t.Helper()
	got, out, err := s.Exit(binary, args...)
	if err != nil {
		t.Fatal(err)
	}
	if got != code {
		t.Errorf("kasway-%s %s: exit code %d, want %d:\n%s", binary, strings.Join(args, " "), got, code, out)
	}
	for _, text := range texts {
		if !strings.Contains(out, text) {
			t.Errorf("kasway-%s %s does not say %q:\n%s", binary, strings.Join(args, " "), text, out)
		}
	}
}

// Commands say what they found, with the exit code of the contract, and those
// that only look change nothing.
func TestCommands(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	s.Hosts = s.file(t, "hosts", "192.0.2.9 kas.example.svc\n2001:db8::9 kas.example.svc\n")
	around := netns.Around{Trees: []string{s.Dir}}
	before, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	run := func(more ...string) []string { return append(append([]string{"run"}, s.AgentFlags()...), more...) }
	exits(t, s, 0, "agent", []string{"version"}, "kasway-agent")
	exits(t, s, 0, "server", []string{"version"}, "kasway-server")
	exits(t, s, 2, "agent", []string{"no-such-command"}, "unknown command")
	exits(t, s, 2, "agent", []string{"run", "--no-such-flag"}, "no-such-flag")
	exits(t, s, 2, "server", []string{"run", "--listne", ":1"}, "did you mean --listen?")
	exits(t, s, 2, "agent", run("--mode", "nft"), "--target")
	exits(t, s, 1, "agent", []string{"status", "--admin-socket", s.Path("nobody.sock")}, "is it running?")
	exits(t, s, 1, "agent", []string{"status", "--ready", "--admin-socket", s.Path("nobody.sock")})

	const example = "../../examples/agent.yaml"
	exits(t, s, 0, "agent", []string{"rules", "-f", example, "--mode", "nft"}, "table ", "dryrun", "ip daddr 10.96.0.1 tcp dport 443", "ip6 daddr fd00:96::1 tcp dport 443", "192.0.2.9", "2001:db8::9")
	exits(t, s, 0, "agent", []string{"rules", "-f", example, "--mode", "iptables"}, "KASWAY-OUT-dryrun", "10.96.0.1", "fd00:96::1", "192.0.2.9", "2001:db8::9")
	wrong := s.Path("wrong.yaml")
	text, err := os.ReadFile(example)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(wrong, []byte(strings.Replace(string(text), "clients: [host, pods]", "clients: [hosts]", 1)), 0o600); err != nil {
		t.Fatal(err)
	}
	line := "wrong.yaml:" + lineOf(string(text), "clients: [host, pods]")
	exits(t, s, 2, "agent", []string{"rules", "-f", wrong}, line, `"hosts"`, "allowed", "host")
	exits(t, s, 2, "agent", []string{"run", "-f", wrong}, line)
	if err := os.Remove(wrong); err != nil {
		t.Fatal(err)
	}
	exits(t, s, 1, "agent", append([]string{"check"}, append(s.AgentFlags(), diverting("nft")...)...), "server 192.168.77.1:8091", "missing", "remedy: see that the server runs")
	after, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range before.Diff(after) {
		t.Errorf("a command that only looks has changed %s", d)
	}

	s.start(t, diverting("nft"))
	exits(t, s, 0, "agent", append([]string{"check"}, append(s.AgentFlags(), diverting("nft")...)...), "handshake in", "nft would be used")
	exits(t, s, 0, "agent", []string{"status", "--ready", "--admin-socket", s.agent.Socket}, "ready")
	exits(t, s, 0, "agent", []string{"status", "--admin-socket", s.agent.Socket}, "nft", "10.96.0.1:443", "192.168.77.1:8091")
	exits(t, s, 0, "agent", []string{"rules", "--running", "--admin-socket", s.agent.Socket}, "kasway_", "ip daddr 10.96.0.1 tcp dport 443")
	exits(t, s, 1, "agent", s.CleanupArgs(), "an agent is running here")
	st := s.status(t)
	if !st.Ready || st.Mode != "nft" || len(st.Links) != 1 || st.Links[0].State != "up" || len(st.Targets) != 2 {
		t.Errorf("status: %+v", st)
	}
	s.served(t, s.Node, svc4)
}

// lineOf is the number of the line that holds text.
func lineOf(all, text string) string {
	before, _, _ := strings.Cut(all, text)
	return strconv.Itoa(1 + strings.Count(before, "\n"))
}

// Without what the kernel asks for the agent says which privilege is missing,
// with an exit code of its own, and leaves nothing behind.
func TestMissingPrivilege(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	before, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	for _, mode := range []string{"auto", "nft", "iptables"} {
		for _, command := range []string{"run", "check"} {
			args := append(append([]string{"--bounding-set", "-all", "--inh-caps", "-all", "--", s.Binary("agent"), command}, s.AgentFlags()...), diverting(mode)...)
			code, out, err := stack.ExitOf(s.Node.Command("setpriv", args...))
			if err != nil {
				t.Fatal(err)
			}
			if code != 77 || !strings.Contains(out, "CAP_NET_ADMIN") {
				t.Errorf("%s, mode %s: exit code %d, want 77 and the capability's name:\n%s", command, mode, code, out)
			}
		}
	}
	after, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range before.Diff(after) {
		t.Errorf("an agent without privileges has left %s", d)
	}
}

// A key that others can read is refused, with the command that mends it.
func TestCase_B89_WorldReadableKey(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	for binary, key := range map[string]string{"agent": s.Path("pki/agent-node.key"), "server": s.Path("pki/server.key")} {
		args := append([]string{"run"}, s.ServerFlags()...)
		if binary == "agent" {
			args = append(append([]string{"run"}, s.AgentFlags()...), diverting("nft")...)
		}
		if err := os.Chmod(key, 0o644); err != nil {
			t.Fatal(err)
		}
		exits(t, s, 2, binary, args, "chmod 600 "+key, "0644")
		if err := os.Chmod(key, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	s.start(t, diverting("nft"))
	s.served(t, s.Node, svc4)
}

// A server that could not tell agents from anybody else does not start, unless
// it is told to, loudly.
func TestCase_B91_ServerWithoutCA(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	args := []string{"run", "--listen", ":8091", "--cert", s.Path("pki/server.crt"), "--key", s.Path("pki/server.key"),
		"--admin-socket", s.Path("server.sock"), "--allowed-destination", kas4.String()}
	exits(t, s, 2, "server", args, "identity.ca", "--ca", "--insecure-agents")
	if err := (netns.Probe{From: s.ControlPlane, To: netip.MustParseAddrPort("127.0.0.1:8091")}).Reach(patience); err == nil {
		t.Error("somebody listens all the same")
	}
	var err error
	if s.server, err = s.Server(kas4.String(), "--insecure-agents"); err != nil {
		t.Fatal(err)
	}
	logged(t, s.server, 0, "INSECURE")
	if err := s.server.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := s.server.Wait(); err != nil {
		t.Error(err)
	}
}
