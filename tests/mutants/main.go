// Command mutants proves that the tests notice: each patch in this folder is a
// small fault, applied to a scratch copy of the tree, and the test that it names
// must fail there. It ends with "N passed, N failed, N skipped".
//
// A patch begins with lines of its own:
//
//	Test: ./pkg/dial TestPipeHalfClose [flags of go test]
//	Why: what the fault would do to a user
//	Slow: yes
//
// The last one is for a test that takes more than a few seconds. Without an
// argument a spread of the others runs, for two minutes at most. With FULL=1 all
// of them run, the tests must pass without the faults, and every TestCase_… of
// the tree must have a patch that names it. Arguments name single patches.
package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"
)

const (
	// few is how many patches run by default.
	few = 12
	// budget is how long after its start a run by default begins another patch.
	budget = 2 * time.Minute
)

// tally counts outcomes and prints each as it comes.
type tally struct {
	out                     io.Writer
	passed, failed, skipped int
}

func (t *tally) say(format string, a ...any) { _, _ = fmt.Fprintf(t.out, format+"\n", a...) }

func (t *tally) pass(format string, a ...any) { t.passed++; t.say("ok   "+format, a...) }
func (t *tally) fail(format string, a ...any) { t.failed++; t.say("FAIL "+format, a...) }
func (t *tally) skip(format string, a ...any) { t.skipped++; t.say("SKIP "+format, a...) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	t := &tally{out: os.Stdout}
	err := run(ctx, t, os.Getenv("FULL") == "1", os.Args[1:])
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
	}
	t.say("%d passed, %d failed, %d skipped", t.passed, t.failed, t.skipped)
	if err != nil || t.failed > 0 {
		os.Exit(1)
	}
}

// run tries the patches named in only, else all of them or a few.
func run(ctx context.Context, t *tally, full bool, only []string) error {
	all, err := load("tests/mutants")
	if err != nil {
		return err
	}
	chosen, err := choose(all, full, only)
	if err != nil {
		return err
	}
	if full && len(only) == 0 {
		for _, c := range uncovered(".", all) {
			t.fail("%s has no mutant", c)
		}
	}
	tree, err := copyTree(ctx)
	if err != nil {
		return err
	}
	defer tree.remove()
	sound := map[string]string{}
	if full || len(only) > 0 {
		t.say("the tests of %d mutants, without the faults", len(chosen))
		if sound, err = tree.sound(ctx, t, chosen); err != nil {
			return err
		}
	}
	begun := time.Now()
	for i, m := range chosen {
		if !full && len(only) == 0 && time.Since(begun) > budget {
			t.say("%d more are left to FULL=1: this machine is slow or busy", len(chosen)-i)
			break
		}
		if err := tree.try(ctx, t, m, sound[m.test]); err != nil {
			return err
		}
	}
	return nil
}

// choose picks what runs, and insists that every name in only is a patch's.
func choose(all []mutant, full bool, only []string) ([]mutant, error) {
	if len(only) > 0 {
		var chosen []mutant
		for _, name := range only {
			name = strings.TrimSuffix(name, ".patch")
			i := slices.IndexFunc(all, func(m mutant) bool { return m.name == name })
			if i < 0 {
				return nil, fmt.Errorf("there is no tests/mutants/%s.patch", name)
			}
			chosen = append(chosen, all[i])
		}
		return chosen, nil
	}
	if full {
		return all, nil
	}
	quick := slices.DeleteFunc(slices.Clone(all), func(m mutant) bool { return m.slow })
	if len(quick) <= few {
		return quick, nil
	}
	var chosen []mutant
	for i := range few {
		chosen = append(chosen, quick[i*len(quick)/few])
	}
	return chosen, nil
}
