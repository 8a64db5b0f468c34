package iptables

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// preflight runs m's in the node's namespace.
func (l *lab) preflight(m *Mode) (r intercept.Report) {
	l.t.Helper()
	if err := l.Node.Do(func() error { r = m.Preflight(context.Background()); return nil }); err != nil {
		l.t.Fatal(err)
	}
	return r
}

func TestPreflight_LeavesNothing(t *testing.T) {
	for _, proxy := range netns.KubeProxies {
		t.Run(string(proxy), func(t *testing.T) {
			l := newLab(t)
			l.kubeProxy(proxy)
			before := l.snapshot()
			r := l.preflight(New(Config{}))
			if r.Err != nil {
				t.Errorf("%v; %s", r.Err, r.Remedy)
			}
			if diff := before.Diff(l.snapshot()); len(diff) > 0 {
				t.Errorf("changed:\n%s", strings.Join(diff, "\n"))
			}
			note := strings.Contains(strings.Join(r.Notes, "\n"), "/run/xtables.lock")
			if want := proxy == netns.IptablesLegacy; note != want {
				t.Errorf("a note on the lock: %t, want %t: %q", note, want, r.Notes)
			}
		})
	}
}

// failing answers what a kernel without a table would, whenever an input names
// that table.
func failing(table string, seen *[]string) runner {
	return func(ctx context.Context, input, name string, args ...string) ([]byte, error) {
		*seen = append(*seen, input)
		if strings.Contains(input, "*"+table+"\n") {
			return run(ctx, "", "sh", "-c", "echo 'Table does not exist (do you need to insmod?)' >&2; exit 3")
		}
		return run(ctx, input, name, args...)
	}
}

// A kernel that has table filter and no table nat is refused, with the reason.
func TestCase_B41_NatTableMissing(t *testing.T) {
	l := newLab(t)
	before := l.snapshot()
	var seen []string
	m := New(Config{})
	m.run = failing("nat", &seen)
	r := l.preflight(m)
	if !errors.Is(r.Err, intercept.ErrNotSupported) || !strings.Contains(r.Err.Error(), "table nat cannot be used") || !strings.Contains(r.Err.Error(), "insmod") {
		t.Errorf("got %v, want not supported, with the table and what the command said", r.Err)
	}
	if r.Remedy == "" {
		t.Error("no remedy")
	}
	if !strings.Contains(strings.Join(seen, ""), "*filter\n") {
		t.Error("table filter was not tried: the reason could be another one")
	}
	if diff := before.Diff(l.snapshot()); len(diff) > 0 {
		t.Errorf("left behind:\n%s", strings.Join(diff, "\n"))
	}
}

// What was written and cannot be read back did not come into force.
func TestPreflight_ReadsBack(t *testing.T) {
	l := newLab(t)
	m := New(Config{})
	m.run = func(ctx context.Context, input, name string, args ...string) ([]byte, error) {
		if i := strings.LastIndex(input, "-A "); i >= 0 {
			input = input[:i] + "COMMIT\n" // one rule gets lost
		}
		return run(ctx, input, name, args...)
	}
	if r := l.preflight(m); r.Err == nil || !strings.Contains(r.Err.Error(), "read back") {
		t.Errorf("got %v, want an error about what was read back", r.Err)
	}
}

func TestPreflight_Binaries(t *testing.T) {
	l := newLab(t)
	link := func(names ...string) {
		dir := t.TempDir()
		for _, name := range names {
			for _, suffix := range []string{"", "-save", "-restore"} {
				path, err := exec.LookPath(name + suffix)
				if err != nil {
					t.Fatal(err)
				}
				if err := os.Symlink(path, filepath.Join(dir, name+suffix)); err != nil {
					t.Fatal(err)
				}
			}
		}
		t.Setenv("PATH", dir)
	}
	path := os.Getenv("PATH")

	link()
	if r := l.preflight(New(Config{})); !errors.Is(r.Err, intercept.ErrNotSupported) || !strings.Contains(r.Remedy, "install") {
		t.Errorf("without any binary: %v, %q; want not supported and what to install", r.Err, r.Remedy)
	}
	t.Setenv("PATH", path)
	link("iptables-nft")
	r := l.preflight(New(Config{}))
	if r.Err != nil || !strings.Contains(strings.Join(r.Notes, "\n"), "ip6tables-nft is not installed") {
		t.Errorf("with iptables-nft alone: %v, notes %q; want IPv4 only, with a note", r.Err, r.Notes)
	}
	t.Setenv("PATH", path)
	link("iptables-legacy", "ip6tables-legacy")
	m := New(Config{})
	if r := l.preflight(m); r.Err != nil || m.back != legacy {
		t.Errorf("with legacy alone: %v, back end %q", r.Err, m.back)
	}
}

// Without ip6tables targets with IPv6 addresses are an error before anything is
// touched, and others are not.
func TestApply_WithoutIPv6(t *testing.T) {
	l := newLab(t)
	before := l.snapshot()
	m := New(Config{})
	err := l.Node.Do(func() error {
		if err := m.choose(context.Background()); err != nil {
			t.Error(err)
		}
		m.tools.v6 = nil
		return m.Apply(context.Background(), intercepttest.State(rules.Refuse))
	})
	if !errors.Is(err, intercept.ErrNotSupported) || !strings.Contains(err.Error(), "ip6tables-nft") {
		t.Errorf("got %v, want not supported, naming ip6tables-nft", err)
	}
	if diff := before.Diff(l.snapshot()); len(diff) > 0 {
		t.Errorf("changed:\n%s", strings.Join(diff, "\n"))
	}
	if err := m.Close(); err != nil {
		t.Error(err)
	}
}

func TestApply_RefusesNonsense(t *testing.T) {
	for name, spoil := range map[string]func(*rules.State){
		"no generation":   func(s *rules.State) { s.Generation = "" },
		"long generation": func(s *rules.State) { s.Generation = strings.Repeat("a", 16) },
		"bad generation":  func(s *rules.State) { s.Generation = "a\n-F" },
		"no mark":         func(s *rules.State) { s.Mark = 0 },
		"no mask":         func(s *rules.State) { s.MarkMask = 0 },
	} {
		s := intercepttest.State(rules.Refuse)
		spoil(&s)
		m := New(Config{})
		m.run = func(context.Context, string, string, ...string) ([]byte, error) {
			t.Errorf("%s: a command was run", name)
			return nil, errors.New("no")
		}
		if err := m.Apply(context.Background(), s); err == nil {
			t.Errorf("%s: applied", name)
		}
	}
}

// Either privilege alone is not enough, and the answer says which are needed.
func TestPreflight_Privileges(t *testing.T) {
	netns.Require(t)
	for name, drop := range map[string]int{"CAP_NET_ADMIN": unix.CAP_NET_ADMIN, "CAP_NET_RAW": unix.CAP_NET_RAW} {
		report := make(chan intercept.Report)
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends without the capability
			if err := without(drop); err != nil {
				report <- intercept.Report{Err: err}
				report <- intercept.Report{Err: err}
				return
			}
			report <- New(Config{}).Preflight(context.Background())
			report <- intercept.Report{Err: Cleanup(context.Background())}
		}()
		r := <-report
		if cleanup := <-report; !errors.Is(cleanup.Err, intercept.ErrPrivilege) {
			t.Errorf("cleanup without %s: %v, want missing privilege", name, cleanup.Err)
		}
		if !errors.Is(r.Err, intercept.ErrPrivilege) || !strings.Contains(r.Remedy, "CAP_NET_ADMIN and CAP_NET_RAW") {
			t.Errorf("without %s: %v, remedy %q", name, r.Err, r.Remedy)
		}
	}
}

// without takes a capability from the calling thread.
func without(capability int) error {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return err
	}
	data[capability/32].Effective &^= 1 << (capability % 32)
	return unix.Capset(&header, &data[0])
}

// Somebody who never lets go of the lock makes the answer inconclusive, soon.
func TestPreflight_LockHeld(t *testing.T) {
	lock := filepath.Join(t.TempDir(), "xtables.lock")
	t.Setenv("XTABLES_LOCKFILE", lock)
	l := newLab(t)
	l.kubeProxy(netns.IptablesLegacy)
	f, err := os.OpenFile(lock, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Flock(int(f.Fd()), unix.LOCK_EX); err != nil {
		t.Fatal(err)
	}
	begun := time.Now()
	r := l.preflight(New(Config{}))
	if r.Err == nil || errors.Is(r.Err, intercept.ErrNotSupported) || errors.Is(r.Err, intercept.ErrPrivilege) || !strings.Contains(r.Remedy, "lock") {
		t.Errorf("got %v, remedy %q; want inconclusive, with the lock as the remedy", r.Err, r.Remedy)
	}
	if took := time.Since(begun); took > 4*lockWait*time.Second {
		t.Errorf("took %s", took)
	}
}
