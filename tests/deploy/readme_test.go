package deploy

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// section is the text of the README under a heading.
func section(t *testing.T, heading string) string {
	t.Helper()
	_, rest, ok := strings.Cut(string(read(t, "README.md")), "\n## "+heading+"\n")
	if !ok {
		t.Fatalf("the README has no section %q", heading)
	}
	text, _, _ := strings.Cut(rest, "\n## ")
	return text
}

var consoleBlock = regexp.MustCompile("(?s)```console\n(.*?)```")

// blocks are the commands of a section, block by block.
func blocks(t *testing.T, heading string) (all [][]string) {
	t.Helper()
	for _, m := range consoleBlock.FindAllStringSubmatch(section(t, heading), -1) {
		var commands []string
		for line := range strings.Lines(m[1]) {
			command, ok := strings.CutPrefix(strings.TrimSpace(line), "# ")
			if !ok {
				t.Fatalf("README: line %q is no command", line)
			}
			commands = append(commands, command)
		}
		all = append(all, commands)
	}
	return all
}

// terminal is root's shell on a host, with the names that the README uses.
type terminal struct {
	host            *netns.Host
	dir, hosts, bin string // its files, /etc/hosts, and the folder of the binaries
}

func (c terminal) command(line string) (*netns.Cmd, error) {
	work := filepath.Join(c.dir, "root")
	mounts := []bind{{From: c.hosts, To: "/etc/hosts"}}
	// What the commands keep is the host's, not the machine's. Neither are the
	// machine's cgroups: mode ebpf would divert everybody there.
	for _, at := range []string{"/run", "/var/lib", "/sys/fs/cgroup"} {
		from := filepath.Join(c.dir, at)
		if err := os.MkdirAll(from, 0o755); err != nil {
			return nil, err
		}
		mounts = append(mounts, bind{From: from, To: at})
	}
	if err := os.MkdirAll(work, 0o700); err != nil {
		return nil, err
	}
	return spec{Privileged: true, Mounts: mounts, Dir: work, Argv: []string{"/bin/sh", "-c", "exec " + line},
		Env: []string{"PATH=" + c.bin + ":/usr/sbin:/usr/bin:/sbin:/bin"}}.command(c.host)
}

// run runs a command to its end, which must be good.
func (c terminal) run(line string) (string, error) {
	cmd, err := c.command(line)
	if err != nil {
		return "", err
	}
	code, out, err := stack.ExitOf(cmd)
	if err == nil && code != 0 {
		err = fmt.Errorf("%s exits %d:\n%s", line, code, out)
	}
	return out, err
}

// play runs the commands of a block in order, and is given each that stays.
func (c terminal) play(t *testing.T, s *site, name string, block []string, stays func(line string) bool, settle func() error) (left *netns.Cmd) {
	t.Helper()
	for _, line := range block {
		if !stays(line) {
			if _, err := c.run(line); err != nil {
				t.Fatal(err)
			}
			continue
		}
		cmd, err := c.command(line)
		if err != nil {
			t.Fatal(err)
		}
		s.start(t, name, cmd)
		if err := netns.Poll(patience, settle); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		left = cmd
	}
	return left
}

func runs(line string) bool { return strings.Contains(line, " run ") }

// The commands of "Use it", as they stand there, bring a node to its KAS.
func TestREADME_UseIt(t *testing.T) {
	t.Parallel()
	netns.Require(t)
	bin, err := made.bin()
	if err != nil {
		t.Fatal(err)
	}
	s := newSite(t, netns.Spec{RoutedPods: 1, BridgePods: 1})
	cp := terminal{s.ControlPlane, s.cp, s.hosts, bin}
	node := terminal{s.Node, s.dir, s.hosts, bin}
	all := blocks(t, "Use it")
	if len(all) != 2 {
		t.Fatalf("%d blocks, want the server's and the node's", len(all))
	}
	server := cp.play(t, s, "server", all[0], runs, func() error {
		return netns.Probe{From: s.ControlPlane, To: netip.AddrPortFrom(s.ControlPlane.Addr4, stack.Port)}.Reach(patience)
	})
	// "with agent-node1.crt, agent-node1.key and ca.crt copied to it"
	if _, err := node.run("true"); err != nil {
		t.Fatal(err)
	}
	for file, mode := range map[string]os.FileMode{"agent-node1.crt": 0o644, "agent-node1.key": 0o600, "ca.crt": 0o644} {
		text, err := os.ReadFile(filepath.Join(s.cp, "root/pki", file))
		if err == nil {
			err = os.WriteFile(filepath.Join(s.dir, "root", file), text, mode)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	before, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	known := []netip.AddrPort{clusterIP, kas4} // the target of the README's command
	if err := s.nobody(patience/40, known...); err != nil {
		t.Fatal(err)
	}
	agent := node.play(t, s, "agent", all[1], runs, func() error { _, err := node.run("kasway-agent status --ready"); return err })
	if server == nil || agent == nil {
		t.Fatal("the README starts no server or no agent")
	}
	if err := s.everybody(known...); err != nil {
		t.Error(err)
	}
	during, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range all[1] {
		if !runs(line) {
			continue
		}
		if out, err := node.run(strings.Replace(line, " run ", " rules ", 1)); err != nil || !strings.Contains(out, "10.96.0.1") {
			t.Errorf("rules: %v\n%s", err, out)
		}
	}
	if _, err := node.run("kasway-agent cleanup"); err == nil {
		t.Error("cleanup removes what a running agent uses")
	}
	if after, err := s.Node.Snapshot(netns.Around{}); err != nil || len(during.Diff(after)) > 0 {
		t.Errorf("rules or a refused cleanup have changed the node: %v %v", err, during.Diff(after))
	}
	for _, p := range []*netns.Cmd{agent, server} {
		if err := p.Signal(syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		if err := p.Wait(); err != nil {
			t.Errorf("asked to stop: %v", err)
		}
	}
	if _, err := node.run("kasway-agent cleanup"); err != nil {
		t.Error(err)
	}
	after, err := s.Node.Snapshot(netns.Around{})
	if err != nil {
		t.Fatal(err)
	}
	if diff := before.Diff(after); len(diff) > 0 {
		t.Errorf("left after cleanup:\n%s", strings.Join(diff, "\n"))
	}
}

var (
	makeTarget = regexp.MustCompile("(?:^# |`)make ([a-z-]+)")
	link       = regexp.MustCompile(`\]\(([^)]+)\)`)
)

// Every make target and every file that the README names is there.
func TestREADME_NamesWhatIsThere(t *testing.T) {
	text := string(read(t, "README.md"))
	targets := regexp.MustCompile(`(?m)^([a-z-]+):`).FindAllStringSubmatch(string(read(t, "Makefile")), -1)
	there := map[string]bool{}
	for _, m := range targets {
		there[m[1]] = true
	}
	n := 0
	for line := range strings.Lines(text) {
		for _, m := range makeTarget.FindAllStringSubmatch(line, -1) {
			if n++; !there[m[1]] {
				t.Errorf("the Makefile has no target %q", m[1])
			}
		}
	}
	if n < 4 {
		t.Errorf("only %d make targets were found in the README", n)
	}
	for _, m := range link.FindAllStringSubmatch(text, -1) {
		if strings.Contains(m[1], "://") {
			continue
		}
		if _, err := os.Stat(filepath.Join(repository, m[1])); err != nil {
			t.Error(err)
		}
	}
}
