package main

import (
	"bytes"
	"context"
	"encoding/json"
	"flag"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/tunnel"
	"github.com/kasway/kasway/tests/netns"
)

var update = flag.Bool("update", false, "write the golden files anew")

// commandEnv makes the test binary the command itself.
const commandEnv = "KASWAY_TEST_COMMAND"

// The commands look at the node that they run on, and some change it.
func TestMain(m *testing.M) {
	if os.Getenv(commandEnv) != "" {
		os.Exit(cli.Main(root(), os.Args[1:], os.Stdout, os.Stderr))
	}
	netns.Isolate()
	goleak.VerifyTestMain(m)
}

// example is the committed configuration with everything in it.
const example = "../../examples/agent.yaml"

// command runs one to its end.
func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = cli.Run(t.Context(), root(), args, &out, &errs)
	return code, out.String(), errs.String()
}

// ok runs a command that must succeed.
func ok(t *testing.T, args ...string) string {
	t.Helper()
	code, out, errs := command(t, args...)
	if code != cli.OK || errs != "" {
		t.Fatalf("%v: exit %d: %s%s", args, code, out, errs)
	}
	return out
}

// asNobody runs one in a process without any privilege.
func asNobody(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	const nobody = 65534
	dir, err := os.MkdirTemp("", "kasway-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	// Where tests are built only root may go.
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(dir, binary)
	if err := os.WriteFile(path, self, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), bound)
	defer cancel()
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir, cmd.Env = dir, append(os.Environ(), commandEnv+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
	var out, errs bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errs
	if err := cmd.Run(); err != nil && cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return cmd.ProcessState.ExitCode(), out.String(), errs.String()
}

// golden compares text with a committed file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got; -update writes it anew):\n%s", path, diff)
	}
}

// bound is what nothing here takes unless it never happens.
const bound = 30 * time.Second

func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(bound); !ok(); time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("never: %s", what)
		}
	}
}

// pki makes a CA and the certificates of an agent and a server at 127.0.0.1.
func pki(t *testing.T) (dir string) {
	t.Helper()
	dir = t.TempDir()
	a, err := certs.NewAuthority("test CA", 24*time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	save := func(name string, p certs.Pair, err error) {
		t.Helper()
		if err == nil {
			_, _, err = certs.Save(dir, name, p, false)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	save("ca", a.Pair, nil)
	p, err := a.IssueAgent(certs.AgentRequest{Name: "node1", TrustDomain: "kasway", Validity: 12 * time.Hour})
	save("agent", p, err)
	p, err = a.IssueServer(certs.ServerRequest{IPs: loopback, Validity: 12 * time.Hour})
	save("server", p, err)
	return dir
}

func identity(dir string) []string {
	return []string{"--cert", filepath.Join(dir, "agent.crt"), "--key", filepath.Join(dir, "agent.key"), "--ca", filepath.Join(dir, "ca.crt")}
}

func TestHelp(t *testing.T) {
	for name, args := range map[string][]string{
		"help":         {"--help"},
		"help-run":     {"run", "--help"},
		"help-check":   {"check", "--help"},
		"help-rules":   {"rules", "--help"},
		"help-status":  {"status", "--help"},
		"help-cleanup": {"cleanup", "--help"},
	} {
		golden(t, name, ok(t, args...))
	}
}

// Every flag of the configuration is in a group of the help.
func TestHelpHasNoOtherFlags(t *testing.T) {
	for _, c := range []string{"run", "check", "rules"} {
		if out := ok(t, c, "--help"); strings.Contains(out, "\nOther:") {
			t.Errorf("some flags are in no group:\n%s", out)
		}
	}
}

func TestWrongUsage(t *testing.T) {
	for want, args := range map[string][]string{
		"did you mean status":                    {"statsu"},
		"did you mean --when-down":               {"run", "--when-donw", "refuse"},
		`unexpected argument "now"`:              {"run", "now"},
		`--output "xml": allowed are table and`:  {"version", "-o", "xml"},
		"targets: missing":                       {"check", "--config", os.DevNull},
		"no-such.yaml: no such file":             {"rules", "-f", "no-such.yaml"},
		"intercept.mode":                         {"rules", "-f", "testdata/wrong.yaml"},
		"--mode: ":                               {"rules", "-f", example, "--mode", "ebpf2"},
		"identity.certificate: stat testdata/no": {"run", "-f", example, "--cert", "testdata/no.crt"},
	} {
		code, out, errs := command(t, args...)
		if code != cli.Usage || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, stdout %q, stderr %q, want it to say %q", args, code, out, errs, want)
		}
	}
}

// 77 tells a supervisor that another try will not help.
func TestCase_B64_WithoutPrivilege(t *testing.T) {
	netns.Require(t)
	flags := []string{
		"--target", "kas=10.96.0.1:443", "--clients", "host", "--server", "127.0.0.1:1",
		"--cert", "/proc/self/exe", "--key", "/nowhere", "--ca", "/proc/self/exe",
	}
	code, out, errs := asNobody(t, append([]string{"check"}, flags...)...)
	if code != cli.Privilege || !strings.Contains(out, "SO_MARK") || !strings.Contains(errs, "missing privilege") {
		t.Errorf("check: exit %d\n%s%s", code, out, errs)
	}
	for _, says := range []string{"mode nft", "mode iptables", "CAP_NET_ADMIN", "none of these can be used"} {
		if !strings.Contains(out, says) {
			t.Errorf("check does not say %q:\n%s", says, out)
		}
	}
	code, _, errs = asNobody(t, append([]string{"check", "--mode", "nft"}, flags...)...)
	if code != cli.Privilege || !strings.Contains(errs, "mode nft") {
		t.Errorf("check of one mode: exit %d\n%s", code, errs)
	}
	code, out, errs = asNobody(t, "cleanup", "--admin-socket", "none.sock", "--state-dir", "none")
	if code != cli.Privilege || out != "" || !strings.Contains(errs, "mode nft: ") {
		t.Errorf("cleanup: exit %d\n%s%s", code, out, errs)
	}
	if code, out, _ := asNobody(t, "version"); code != cli.OK || !strings.HasPrefix(out, "kasway-agent ") {
		t.Errorf("version: exit %d: %s", code, out)
	}
}

func TestVersion(t *testing.T) {
	var v struct{ Version, Go string }
	if err := json.Unmarshal([]byte(ok(t, "version", "-o", "json")), &v); err != nil || v.Version == "" || v.Go == "" {
		t.Errorf("%+v, %v", v, err)
	}
	if out := ok(t, "version"); !strings.HasPrefix(out, "kasway-agent ") {
		t.Error(out)
	}
}

// The agent does not know the tunnel; the words must be the same all the same.
func TestLinkUp(t *testing.T) {
	if agent.LinkUp != tunnel.StateUp {
		t.Errorf("%q and %q", agent.LinkUp, tunnel.StateUp)
	}
}
