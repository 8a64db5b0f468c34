package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"
)

// tree is a scratch copy of the source tree.
type tree struct{ dir string }

// copyTree copies what git tracks or would track, as it stands now.
func copyTree(ctx context.Context) (*tree, error) {
	files, err := exec.CommandContext(ctx, "git", "ls-files", "-co", "--exclude-standard", "-z").Output()
	if err != nil {
		return nil, fmt.Errorf("git ls-files: %w", err)
	}
	dir, err := os.MkdirTemp("", "kasway-mutants-")
	if err != nil {
		return nil, err
	}
	t := &tree{dir}
	for f := range strings.SplitSeq(strings.TrimRight(string(files), "\x00"), "\x00") {
		if err := copyFile(f, filepath.Join(dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) { // deleted, not yet committed
			t.remove()
			return nil, err
		}
	}
	return t, nil
}

func copyFile(from, to string) error {
	data, err := os.ReadFile(from)
	if err != nil {
		return err
	}
	info, err := os.Stat(from)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(to), 0o755); err != nil {
		return err
	}
	return os.WriteFile(to, data, info.Mode())
}

func (t *tree) remove() { _ = os.RemoveAll(t.dir) }

// try applies m, runs its test and takes m out again. An error means that the
// tree cannot be used any more.
func (t *tree) try(ctx context.Context, out *tally, m mutant, unsound string) (err error) {
	switch unsound {
	case "":
	case skipped:
		out.skip("%s: %s is skipped here", m.name, m.test)
		return nil
	default:
		out.fail("%s: %s fails without the fault too", m.name, m.test)
		return nil
	}
	restore, err := t.keep(m.touches)
	if err != nil {
		out.fail("%s: what it changes is gone: %v", m.name, err)
		return nil
	}
	defer func() { err = errors.Join(err, restore()) }()
	if text, err := t.command(ctx, "git", applying(m)...).CombinedOutput(); err != nil {
		out.fail("%s does not apply any more: %s", m.name, text)
		return ctx.Err()
	}
	start := time.Now()
	limit := quickLimit
	if m.slow {
		limit = slowLimit
	}
	text, err := t.test(ctx, limit, m.pkg, "^"+strings.ReplaceAll(m.test, "/", "$/^")+"$", m.flags)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	took := time.Since(start).Seconds()
	switch verdict := judge(text, err); verdict {
	case noticed:
		out.pass("%s: %s fails, as it must (%.1f s)", m.name, m.test, took)
	case skipped:
		out.skip("%s: %s is skipped here", m.name, m.test)
	default:
		out.fail("%s: %s (%s %s; %.1f s): %s", m.name, verdict, m.pkg, m.test, took, m.why)
		if verdict != survived {
			out.say("%s", text)
		}
	}
	return nil
}

// applying are git's arguments. Code around the fault may have moved: one line
// of context on each side is enough.
func applying(m mutant) []string { return []string{"apply", "-p1", "-C1", m.file} }

// Outcomes of a test run with a fault.
const (
	noticed  = "noticed"
	skipped  = "skipped"
	survived = "the test passes all the same"
	noTest   = "there is no such test"
	noBuild  = "it does not build"
	unclear  = "the test did not run"
)

// died tells that a test failed, or took the whole process with it.
var died = regexp.MustCompile(`(?m)^\s*--- FAIL: |^panic: |^fatal error: |^WARNING: DATA RACE|^goleak: `)

// judge reads the output of go test -v.
func judge(output []byte, err error) string {
	switch {
	case bytes.Contains(output, []byte("[build failed]")), bytes.Contains(output, []byte("[setup failed]")):
		return noBuild
	case bytes.Contains(output, []byte("no tests to run")):
		return noTest
	case err != nil && died.Match(output):
		return noticed
	case err != nil:
		return unclear
	case bytes.Contains(output, []byte("--- SKIP: ")):
		return skipped
	}
	return survived
}

// sound runs the tests of all mutants without a fault, and returns for each that
// did not pass how it ended: a fault that a broken test notices proves nothing.
func (t *tree) sound(ctx context.Context, out *tally, all []mutant) (map[string]string, error) {
	type group struct{ pkg, flags string }
	tests := map[group][]string{}
	var order []group
	for _, m := range all {
		g := group{m.pkg, strings.Join(m.flags, " ")}
		if tests[g] == nil {
			order = append(order, g)
		}
		if !slices.Contains(tests[g], m.topTest()) {
			tests[g] = append(tests[g], m.topTest())
		}
	}
	ended := map[string]string{}
	for _, g := range order {
		text, err := t.test(ctx, slowLimit, g.pkg, "^("+strings.Join(tests[g], "|")+")$", strings.Fields(g.flags))
		if ctx.Err() != nil {
			return nil, ctx.Err()
		}
		if err != nil {
			out.say("%s without a fault: %v\n%s", g.pkg, err, text)
		}
		for _, m := range all {
			switch {
			case m.pkg != g.pkg || strings.Join(m.flags, " ") != g.flags, bytes.Contains(text, []byte("--- PASS: "+m.topTest()+" (")):
			case bytes.Contains(text, []byte("--- SKIP: "+m.topTest()+" (")):
				ended[m.test] = skipped
			default:
				ended[m.test] = "failed"
			}
		}
	}
	return ended, nil
}

// How long a test may run, without its compilation, unless the patch has a
// -timeout: a fault that lets it hang is noticed too.
const (
	quickLimit = time.Minute
	slowLimit  = 10 * time.Minute
)

// test runs tests of a package. It compiles as `make build` does, and so finds
// most of it in Go's cache.
func (t *tree) test(ctx context.Context, limit time.Duration, pkg, pattern string, flags []string) ([]byte, error) {
	args := []string{"test", "-trimpath", "-ldflags=-s -w", "-vet=off", "-count=1", "-v", "-timeout=" + limit.String(), "-run", pattern}
	if slices.Contains(flags, "-race") {
		return t.command(ctx, "go", append(append(args, flags...), pkg)...).CombinedOutput()
	}
	// The test itself may compile, and then as it wants.
	args = append(args, "-exec=env -u CGO_ENABLED")
	cmd := t.command(ctx, "go", append(append(args, flags...), pkg)...)
	cmd.Env = append(cmd.Env, "CGO_ENABLED=0")
	return cmd.CombinedOutput()
}

// command makes a command that runs in the tree. When ctx ends it is asked to
// end, so that tests can take down what they have put up.
func (t *tree) command(ctx context.Context, name string, args ...string) *exec.Cmd {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = t.dir
	// FULL is ours: the tests have long and short forms by it too.
	cmd.Env = append(slices.DeleteFunc(os.Environ(), func(s string) bool { return strings.HasPrefix(s, "FULL=") }),
		"GIT_CEILING_DIRECTORIES="+filepath.Dir(t.dir))
	cmd.Cancel = func() error { return cmd.Process.Signal(syscall.SIGTERM) }
	cmd.WaitDelay = 30 * time.Second
	return cmd
}

// keep remembers files, and returns what puts them back.
func (t *tree) keep(files []string) (restore func() error, err error) {
	was := map[string][]byte{}
	for _, f := range files {
		path := filepath.Join(t.dir, f)
		if was[path], err = os.ReadFile(path); err != nil {
			return nil, err
		}
	}
	return func() error {
		var errs []error
		for path, data := range was {
			errs = append(errs, os.WriteFile(path, data, 0o644))
		}
		return errors.Join(errs...)
	}, nil
}
