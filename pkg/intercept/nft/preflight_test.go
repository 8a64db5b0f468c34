package nft

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

// preflightEnv makes the test binary print what Preflight finds.
const preflightEnv = "KASWAY_NFT_TEST_PREFLIGHT"

func preflightChild() {
	r := New(Config{}).Preflight(context.Background())
	fmt.Println(errors.Is(r.Err, intercept.ErrPrivilege), r.Err, r.Remedy)
}

func TestPreflightFindsNothingWrongAndLeavesNothing(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	if _, err := w.Node.RunInput("table ip early { chain out { type nat hook output priority -110; }; chain late { type nat hook output priority -109; }; }", "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	before, err := w.Node.Run("nft", "list", "ruleset")
	if err != nil {
		t.Fatal(err)
	}
	var r intercept.Report
	if err := w.Node.Do(func() error { r = New(Config{}).Preflight(context.Background()); return nil }); err != nil {
		t.Fatal(err)
	}
	if r.Err != nil {
		t.Errorf("%v; %s", r.Err, r.Remedy)
	}
	notes := strings.Join(r.Notes, "\n")
	if !strings.Contains(notes, "chain out of table early has priority -110") || strings.Contains(notes, "late") {
		t.Errorf("notes:\n%s", notes)
	}
	if after, err := w.Node.Run("nft", "list", "ruleset"); err != nil || after != before {
		t.Errorf("changed: %v\n%s", err, after)
	}
}

func TestNoteOfAnotherNamespaceThanTheHosts(t *testing.T) {
	dir := t.TempDir()
	for name, ns := range map[string]string{"own": "net:[1]", "same": "net:[1]", "host": "net:[2]"} {
		if err := os.Symlink(ns, dir+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	if notes := namespaceNote(dir+"/own", dir+"/host"); len(notes) != 1 || !strings.Contains(notes[0], "hostNetwork") {
		t.Errorf("%q", notes)
	}
	for _, other := range []string{"same", "unreadable"} {
		if notes := namespaceNote(dir+"/own", dir+"/"+other); len(notes) != 0 {
			t.Errorf("%s: %q", other, notes)
		}
	}
}

func TestCase_B64_NFTWithoutPrivilege(t *testing.T) {
	w := newWorld(t, netns.Spec{})
	exe := copyForAnybody(t)
	for name, user := range map[string]uint32{"root": 0, "nobody": 65534} {
		cmd := w.Node.Command(exe)
		cmd.Env = []string{preflightEnv + "=1"}
		cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: user, Gid: user}}
		var out strings.Builder
		cmd.Stdout = &out
		if err := cmd.Run(); err != nil {
			t.Fatal(err)
		}
		if want := user != 0; strings.HasPrefix(out.String(), "true") != want || strings.Contains(out.String(), "CAP_NET_ADMIN") != want {
			t.Errorf("%s: %s", name, out.String())
		}
	}
}

// copyForAnybody puts the test binary where other users may run it.
func copyForAnybody(t *testing.T) string {
	t.Helper()
	data, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp("", "kasway-nft")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	path := dir + "/agent"
	if err := errors.Join(os.Chmod(dir, 0o755), os.WriteFile(path, data, 0o755)); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestClassifyTellsThreeAnswersApart(t *testing.T) {
	for _, c := range []struct {
		err  error
		want error
	}{
		{nil, nil},
		{unix.EPERM, intercept.ErrPrivilege},
		{unix.EACCES, intercept.ErrPrivilege},
		{unix.EOPNOTSUPP, intercept.ErrNotSupported},
		{unix.ENOENT, intercept.ErrNotSupported},
		{unix.EPROTONOSUPPORT, intercept.ErrNotSupported},
		{unix.ENOMEM, unix.ENOMEM},
	} {
		var err error
		if c.err != nil {
			err = fmt.Errorf("wrapped: %w", c.err)
		}
		r := classify(err)
		if !errors.Is(r.Err, c.want) || (r.Err == nil) != (c.want == nil) {
			t.Errorf("%v: %v", c.err, r.Err)
		}
		if errors.Is(r.Err, intercept.ErrPrivilege) && errors.Is(r.Err, intercept.ErrNotSupported) {
			t.Errorf("%v: two answers at once", c.err)
		}
		if (r.Err != nil) != (r.Remedy != "") {
			t.Errorf("%v: remedy %q", c.err, r.Remedy)
		}
	}
}
