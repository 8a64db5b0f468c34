// Command mutants proves that the tests notice: each patch in this folder is a
// small fault, applied to a scratch copy of the tree, and the test it names must
// fail there. It ends with "N passed, N failed, N skipped".
//
// A patch begins with lines of its own:
//
//	Test: ./pkg/dial TestPipeHalfClose [go test flags]
//	Why: what the fault would do to a user
//
// By default a spread of them runs; FULL=1 runs all, and checks besides that
// every TestCase_… of the tree has a patch that names it.
package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"time"
)

// few is how many patches run without FULL=1.
const few = 5

// timeLimit bounds one test run; a mutant that hangs its test is noticed too.
const timeLimit = 3 * time.Minute

type mutant struct {
	name, file string
	pkg, test  string
	flags      []string
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	passed, failed, err := run(ctx, os.Getenv("FULL") == "1", os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
	fmt.Printf("%d passed, %d failed, 0 skipped\n", passed, failed)
	if failed > 0 {
		os.Exit(1)
	}
}

// run tries the chosen mutants: those named in only, else all or a few.
func run(ctx context.Context, full bool, only []string) (passed, failed int, err error) {
	all, err := load("tests/mutants")
	if err != nil {
		return 0, 0, err
	}
	if full {
		for _, c := range uncovered(all) {
			fmt.Printf("FAIL %s has no mutant\n", c)
			failed++
		}
	}
	scratch, err := os.MkdirTemp("", "kasway-mutants-")
	if err != nil {
		return 0, 0, err
	}
	defer os.RemoveAll(scratch)
	if err := copyTree(ctx, scratch); err != nil {
		return 0, 0, err
	}
	for _, m := range choose(all, full, only) {
		start := time.Now()
		why := m.try(ctx, scratch)
		if why != nil {
			failed++
			fmt.Printf("FAIL %s (%s): %v\n", m.name, m.test, why)
			continue
		}
		passed++
		fmt.Printf("ok   %s: %s fails, as it must (%.1fs)\n", m.name, m.test, time.Since(start).Seconds())
	}
	return passed, failed, ctx.Err()
}

func choose(all []mutant, full bool, only []string) []mutant {
	switch {
	case len(only) > 0:
		return slices.DeleteFunc(all, func(m mutant) bool { return !slices.Contains(only, m.name) })
	case full || len(all) <= few:
		return all
	}
	var chosen []mutant
	for i := range few {
		chosen = append(chosen, all[i*len(all)/few])
	}
	return chosen
}

func load(dir string) ([]mutant, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	var all []mutant
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		abs, err := filepath.Abs(f)
		if err != nil {
			return nil, err
		}
		m := mutant{name: strings.TrimSuffix(filepath.Base(f), ".patch"), file: abs}
		head, _, _ := strings.Cut(string(text), "\n--- ")
		for line := range strings.Lines(head) {
			if rest, ok := strings.CutPrefix(line, "Test: "); ok {
				if w := strings.Fields(rest); len(w) >= 2 {
					m.pkg, m.test, m.flags = w[0], w[1], w[2:]
				}
			}
		}
		if m.test == "" || !strings.Contains(head, "\nWhy: ") {
			return nil, fmt.Errorf("%s: wants the lines \"Test: ./package TestName\" and \"Why: …\" before the patch", f)
		}
		all = append(all, m)
	}
	if len(all) == 0 {
		return nil, fmt.Errorf("no patches in %s: run from the top of the source tree", dir)
	}
	return all, nil
}

var caseName = regexp.MustCompile(`(?m)^func (TestCase_B\d+)\w*\(`)

// uncovered lists the cases of the tree that no mutant names.
func uncovered(all []mutant) []string {
	missing := map[string]bool{}
	_ = filepath.WalkDir(".", func(path string, _ os.DirEntry, err error) error {
		if err == nil && strings.HasSuffix(path, "_test.go") {
			text, _ := os.ReadFile(path)
			for _, m := range caseName.FindAllSubmatch(text, -1) {
				missing[string(m[1])] = true
			}
		}
		return nil
	})
	for _, m := range all {
		if c, _, ok := strings.Cut(strings.TrimPrefix(m.test, "TestCase_"), "_"); ok {
			delete(missing, "TestCase_"+c)
		}
	}
	var names []string
	for c := range missing {
		names = append(names, c)
	}
	slices.Sort(names)
	return names
}

// copyTree copies what git tracks or would track, as it stands now.
func copyTree(ctx context.Context, dst string) error {
	list := exec.CommandContext(ctx, "git", "ls-files", "-co", "--exclude-standard", "-z")
	files, err := list.Output()
	if err != nil {
		return fmt.Errorf("git ls-files: %w", err)
	}
	for f := range strings.SplitSeq(strings.TrimRight(string(files), "\x00"), "\x00") {
		data, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) {
			continue // deleted, not yet committed
		}
		if err != nil {
			return err
		}
		info, err := os.Stat(f)
		if err != nil {
			return err
		}
		if err := os.MkdirAll(filepath.Dir(filepath.Join(dst, f)), 0o755); err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dst, f), data, info.Mode()); err != nil {
			return err
		}
	}
	return nil
}

// try applies m to the scratch tree, runs its test and takes m out again. It
// returns why the mutant does not count as noticed.
func (m mutant) try(ctx context.Context, scratch string) error {
	if out, err := command(ctx, scratch, "patch", "-p1", "--no-backup-if-mismatch", "-s", "-i", m.file); err != nil {
		return fmt.Errorf("the patch does not apply any more: %s", out)
	}
	defer func() {
		// What cannot be taken out would spoil the mutants after it.
		if out, err := command(context.WithoutCancel(ctx), scratch, "patch", "-R", "-p1", "-s", "-i", m.file); err != nil {
			fmt.Printf("FAIL %s: cannot be reversed: %s\n", m.name, out)
			os.Exit(1)
		}
	}()
	if out, err := command(ctx, scratch, "go", append([]string{"vet"}, m.pkg)...); err != nil {
		return fmt.Errorf("the mutant does not build: %s", out)
	}
	ctx, cancel := context.WithTimeout(ctx, timeLimit)
	defer cancel()
	args := append([]string{"test", "-count=1", "-run", "^" + m.test + "$"}, m.flags...)
	out, err := command(ctx, scratch, "go", append(args, m.pkg)...)
	switch {
	case err == nil && bytes.Contains(out, []byte("no tests to run")):
		return errors.New("there is no such test")
	case err == nil:
		return errors.New("the test still passes")
	}
	return nil
}

func command(ctx context.Context, dir, name string, args ...string) ([]byte, error) {
	cmd := exec.CommandContext(ctx, name, args...)
	cmd.Dir = dir
	return cmd.CombinedOutput()
}
