package deploy

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// unit is a systemd unit: the values of each directive, by section and name.
type unit map[string][]string

func agentUnit(t *testing.T) unit {
	t.Helper()
	u, section := unit{}, ""
	for line := range strings.Lines(string(read(t, "deploy", "systemd", "kasway-agent.service"))) {
		line = strings.TrimSpace(line)
		switch {
		case line == "" || line[0] == '#':
		case line[0] == '[':
			section = strings.Trim(line, "[]")
		default:
			name, value, ok := strings.Cut(line, "=")
			if !ok {
				t.Fatalf("line %q of the unit", line)
			}
			u[section+"."+name] = append(u[section+"."+name], strings.Fields(value)...)
		}
	}
	return u
}

// one is a directive that has one value.
func (u unit) one(name string) string { return strings.Join(u[name], " ") }

func TestUnit_Directives(t *testing.T) {
	u := agentUnit(t)
	for name, want := range map[string]string{
		// The kubelet's first connection is to find the agent.
		"Unit.Before":             "kubelet.service",
		"Install.WantedBy":        "multi-user.target",
		"Service.Restart":         "always",
		"Service.OOMScoreAdjust":  "-900",
		"Service.NoNewPrivileges": "yes",
		"Service.ProtectSystem":   "strict",
		"Service.TimeoutStopSec":  strconv.Itoa(drainSeconds()),
		// A reload hands the service over; Debian 12 does not know notify-reload.
		"Service.Type":         "notify",
		"Service.NotifyAccess": "all",
		"Service.ExecReload":   "/bin/kill -HUP $MAINPID",
		// Else systemd gives up after five quick ends, and the node has no KAS.
		"Unit.StartLimitIntervalSec":       "0",
		"Service.CapabilityBoundingSet":    "CAP_BPF CAP_NET_ADMIN CAP_NET_RAW CAP_NET_BIND_SERVICE",
		"Service.StateDirectory":           filepath.Base(config.AgentDefaults().Intercept.StateDir),
		"Service.RuntimeDirectory":         filepath.Base(filepath.Dir(config.AgentDefaults().Observe.AdminSocket)),
		"Service.ExecStart":                "/usr/bin/kasway-agent run --config " + config.AgentPath,
		"Service.StateDirectoryMode":       "0700",
		"Service.RuntimeDirectoryMode":     "0700",
		"Service.ReadWritePaths":           "/run", // for /run/xtables.lock, which may have to be made
		"Service.AmbientCapabilities":      "",
		"Service.RuntimeDirectoryPreserve": "yes",
	} {
		if got := u.one(name); got != want {
			t.Errorf("%s=%s, want %s", name, got, want)
		}
	}
}

// systemd understands every line of the unit. Machines without it have no use
// for the unit.
func TestUnit_Verifies(t *testing.T) {
	t.Parallel()
	netns.Require(t)
	analyze, err := exec.LookPath("systemd-analyze")
	if err != nil {
		t.Log("no systemd here to ask")
		return
	}
	bin, err := made.bin()
	if err != nil {
		t.Fatal(err)
	}
	text := string(read(t, "deploy", "systemd", "kasway-agent.service"))
	for change, wrong := range map[string]string{"": "", "Restart=": "Restrat="} {
		file := filepath.Join(t.TempDir(), "kasway-agent.service")
		here := strings.ReplaceAll(text, "/usr/bin/kasway-agent", filepath.Join(bin, "kasway-agent"))
		if err := os.WriteFile(file, []byte(strings.Replace(here, change, wrong, 1)), 0o644); err != nil {
			t.Fatal(err)
		}
		out, err := exec.Command(analyze, "verify", file).CombinedOutput()
		var exit *exec.ExitError
		if err != nil && !errors.As(err, &exit) {
			t.Fatal(err)
		}
		if clean := err == nil && len(out) == 0; clean != (change == "") {
			t.Errorf("with %q for %q, systemd-analyze: %v\n%s", wrong, change, err, out)
		}
	}
}

// service is the agent's container as systemd makes it from the unit: the
// machine's programs, and of its files only those that may be written.
func (u unit) service(t *testing.T, s *site, argv ...string) spec {
	t.Helper()
	bin, err := made.bin()
	if err != nil {
		t.Fatal(err)
	}
	box := spec{
		Root: filepath.Join(s.dir, "root"), ReadOnly: u.one("Service.ProtectSystem") == "strict",
		NoNewPrivileges: u.one("Service.NoNewPrivileges") == "yes",
		Argv:            append([]string{"/agent/kasway-agent"}, argv...), Env: []string{"PATH=/usr/sbin:/usr/bin"},
		Mounts: []bind{
			{From: "/usr", To: "/usr", ReadOnly: true}, {From: bin, To: "/agent", ReadOnly: true},
			{From: s.hosts, To: "/etc/hosts", ReadOnly: true},
			{From: filepath.Join(s.dir, "etc/kasway"), To: "/etc/kasway", ReadOnly: true},
		},
	}
	if err := os.MkdirAll(box.Root, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"bin", "lib", "lib64", "sbin"} {
		to, err := os.Readlink("/" + name)
		if err == nil {
			err = os.Symlink(to, filepath.Join(box.Root, name))
		} else {
			box.Mounts, err = append(box.Mounts, bind{From: "/" + name, To: "/" + name, ReadOnly: true}), nil
		}
		if err != nil && !errors.Is(err, os.ErrExist) {
			t.Fatal(err)
		}
	}
	for _, c := range u["Service.CapabilityBoundingSet"] {
		box.Capabilities = append(box.Capabilities, strings.TrimPrefix(c, "CAP_"))
	}
	writable := append([]string{}, u["Service.ReadWritePaths"]...)
	for _, d := range u["Service.StateDirectory"] {
		writable = append(writable, "/var/lib/"+d)
	}
	for _, d := range u["Service.RuntimeDirectory"] {
		writable = append(writable, "/run/"+d)
	}
	for _, path := range writable {
		from := filepath.Join(s.dir, path)
		if err := os.MkdirAll(from, 0o700); err != nil {
			t.Fatal(err)
		}
		box.Mounts = append(box.Mounts, bind{From: from, To: path})
	}
	return box
}

// The agent carries with exactly the capabilities and the files that the unit
// gives it, in the mode that takes most of both; and cleans up with them.
func TestUnit_Suffices(t *testing.T) {
	t.Parallel()
	d := deploy(t, agentPods(t)["static pod"])
	u := agentUnit(t)
	if err := d.Node.InstallKubeProxy(netns.IptablesLegacy, netns.Service{ClusterIP: clusterIP, Endpoint: kas4}); err != nil {
		t.Fatal(err)
	}
	run := func(argv ...string) error {
		cmd, err := u.service(t, d.site, argv...).command(d.Node)
		if err != nil {
			return err
		}
		code, out, err := stack.ExitOf(cmd)
		if err == nil && code != 0 {
			err = fmt.Errorf("%v exits %d: %s", argv, code, out)
		}
		return err
	}
	start := u["Service.ExecStart"]
	box := u.service(t, d.site, append(start[1:], "--mode", "iptables")...)
	around := netns.Around{Trees: []string{filepath.Join(d.dir, "var"), filepath.Join(d.dir, "run/kasway")}}
	before, err := d.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	agent, err := box.command(d.Node)
	if err != nil {
		t.Fatal(err)
	}
	d.start(t, "agent", agent)
	if err := netns.Poll(patience, func() error { return run("status", "--ready") }); err != nil {
		t.Fatal(err)
	}
	if err := d.everybody(known...); err != nil {
		t.Error(err)
	}
	if err := run("check"); err != nil {
		t.Error(err)
	}
	if err := errors.Join(agent.Signal(syscall.SIGTERM), agent.Wait()); err != nil {
		t.Errorf("the agent, asked to stop: %v", err)
	}
	if strings.Contains(d.logs["agent"].String(), `"level":"error"`) {
		t.Error("the agent logs an error")
	}
	if err := run("cleanup"); err != nil {
		t.Error(err)
	}
	d.unchanged(t, before, around)
	if _, err := os.Stat(filepath.Join(d.dir, "run/xtables.lock")); err != nil {
		t.Errorf("the lock that iptables uses is not the node's: %v", err)
	}
}
