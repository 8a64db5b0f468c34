package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// errNoScratch: this process may not make a network namespace.
var errNoScratch = errors.New("making a network namespace")

// probe tries a state with everything in it. A table that nobody has used yet
// would come into being by that, and stay, empty, for ever: it is tried in a
// network namespace of its own, where this process may make one. What others
// have done to a table that is there can be told only in its place.
func (m *Mode) probe(ctx context.Context, v6 bool) error {
	have, err := m.tools.of(v6).tables(ctx)
	if err != nil {
		return err
	}
	missing := func(t rules.IPTable) bool { return !have[t.Name] }
	err = inScratch(func() error { return m.probeTables(ctx, v6, missing) })
	if errors.Is(err, errNoScratch) {
		missing = func(rules.IPTable) bool { return false }
		err = nil
	}
	if err != nil {
		return err
	}
	return m.probeTables(ctx, v6, func(t rules.IPTable) bool { return !missing(t) })
}

// tables are those that exist.
func (t *tool) tables(ctx context.Context) (map[string]bool, error) {
	out, err := t.save(ctx)
	if err != nil {
		return nil, fmt.Errorf("reading the tables of %s: %w", t.name, err)
	}
	have := map[string]bool{}
	for line := range strings.Lines(string(out)) {
		if name, ok := strings.CutPrefix(line, "*"); ok {
			have[strings.TrimSpace(name)] = true
		}
	}
	return have, nil
}

// inScratch runs f on a thread in a network namespace that ends with it. The
// commands and sockets of f are in it as well.
func inScratch(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			// The first thread stands for the process in /proc and never ends:
			// while it is kept busy here, the next goroutine gets another.
			err := inScratch(f)
			runtime.UnlockOSThread()
			done <- err
			return
		}
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			done <- fmt.Errorf("%w: %w", errNoScratch, err)
			return
		}
		done <- f()
	}()
	return <-done
}
