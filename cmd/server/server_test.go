package main

import (
	"bytes"
	"context"
	"flag"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/spf13/cobra"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/cmd/internal/cli"
)

var update = flag.Bool("update", false, "write the golden files anew")

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// command runs one to its end.
func command(t *testing.T, args ...string) (code int, stdout, stderr string) {
	t.Helper()
	var out, errs bytes.Buffer
	code = cli.Run(t.Context(), root(), args, &out, &errs)
	return code, out.String(), errs.String()
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

func TestHelp(t *testing.T) {
	for name, args := range map[string][]string{
		"help":              {"--help"},
		"help-run":          {"run", "--help"},
		"help-certs":        {"certs", "--help"},
		"help-certs-init":   {"certs", "init", "--help"},
		"help-certs-server": {"certs", "server", "--help"},
		"help-certs-agent":  {"certs", "agent", "--help"},
	} {
		code, out, errs := command(t, args...)
		if code != cli.OK || errs != "" {
			t.Errorf("%v: exit %d, %s", args, code, errs)
		}
		golden(t, name, out)
	}
}

// Every flag of the configuration is in a group of the help.
func TestHelpOfRunHasNoOtherFlags(t *testing.T) {
	_, out, _ := command(t, "run", "--help")
	if strings.Contains(out, "\nOther:") {
		t.Errorf("some flags are in no group:\n%s", out)
	}
}

func TestWrongUsage(t *testing.T) {
	for name, args := range map[string][]string{
		"unknown-command":      {"cetrs"},
		"unknown-subcommand":   {"certs", "agnet"},
		"unknown-flag":         {"run", "--allowed-destintaion", "a:1"},
		"unknown-flag-far":     {"run", "--frobnicate"},
		"extra-argument":       {"run", "now"},
		"agent-without-name":   {"certs", "agent"},
		"agent-with-slash":     {"certs", "agent", "--name", "../ca"},
		"server-without-names": {"certs", "server"},
		"server-bad-ip":        {"certs", "server", "--ip", "localhost"},
		"bad-validity":         {"certs", "init", "--validity", "soon"},
		"bad-output":           {"version", "-o", "xml"},
	} {
		code, out, errs := command(t, args...)
		if code != cli.Usage || out != "" {
			t.Errorf("%v: exit %d, stdout %q", args, code, out)
		}
		golden(t, "wrong-"+name, errs)
	}
}

func TestWrongConfiguration(t *testing.T) {
	for want, args := range map[string][]string{
		"identity.ca: missing":                {"--config", "testdata/empty.yaml"},
		"[fd00::1]:6443":                      {"--config", "testdata/empty.yaml", "--insecure-agents", "--allowed-destination", "fd00::1:6443"},
		"testdata/wrong.yaml:4: listen.agent": {"--config", "testdata/wrong.yaml"},
		"testdata/none.yaml: no such file":    {"--config", "testdata/none.yaml"},
	} {
		code, out, errs := command(t, append([]string{"run"}, args...)...)
		if code != cli.Usage || out != "" || !strings.Contains(errs, want) {
			t.Errorf("%v: exit %d, %q, want %q", args, code, errs, want)
		}
	}
}

func TestExitCodes(t *testing.T) {
	if err := exit(nil); err != nil {
		t.Error(err)
	}
	for want, err := range map[int]error{
		cli.Privilege: exit(&fs.PathError{Op: "open", Path: "/x", Err: os.ErrPermission}),
		cli.Failed:    exit(fmt.Errorf("port taken")),
	} {
		c := &cobra.Command{Use: "x", RunE: func(*cobra.Command, []string) error { return err }}
		if code := cli.Run(t.Context(), c, []string{}, &bytes.Buffer{}, &bytes.Buffer{}); code != want {
			t.Errorf("%v exits %d, want %d", err, code, want)
		}
	}
}

func TestVersion(t *testing.T) {
	code, out, _ := command(t, "version", "-o", "json")
	if code != cli.OK || !regexp.MustCompile(`"version": "[^"]+"`).MatchString(out) {
		t.Errorf("exit %d: %s", code, out)
	}
	if code, out, _ := command(t, "version"); code != cli.OK || !strings.HasPrefix(out, "kasway-server ") {
		t.Errorf("exit %d: %s", code, out)
	}
}

// served is a server that runs in this process.
type served struct {
	agents, operators string
	stop              context.CancelFunc
	code              chan int
	stderr            *lockedBuffer
}

type lockedBuffer struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *lockedBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *lockedBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func serve(t *testing.T, args ...string) *served {
	t.Helper()
	s := &served{code: make(chan int, 1), stderr: &lockedBuffer{}}
	up := make(chan struct{})
	c := newRun(func(agents, operators net.Addr) {
		s.agents, s.operators = agents.String(), operators.String()
		close(up)
	})
	ctx, cancel := context.WithCancel(t.Context())
	s.stop = cancel
	t.Cleanup(cancel)
	args = append(args, "--config", "testdata/empty.yaml", "--listen", "127.0.0.1:0", "--observe-address", "127.0.0.1:0",
		"--admin-socket", filepath.Join(t.TempDir(), "s.sock"), "--log-format", "json")
	go func() { s.code <- cli.Run(ctx, c, args, s.stderr, s.stderr) }()
	select {
	case <-up:
	case code := <-s.code:
		t.Fatalf("exit %d: %s", code, s.stderr)
	}
	return s
}
