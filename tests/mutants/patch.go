package main

import (
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// mutant is one patch.
type mutant struct {
	name  string   // of the file, without its ending
	file  string   // its absolute path
	pkg   string   // "./pkg/dial"
	test  string   // "TestPipeHalfClose", or with a subtest behind a slash
	flags []string // of go test
	why   string
	slow  bool
	// touches are the files that the patch changes, relative to the tree.
	touches []string
}

// topTest is the test function, without a subtest.
func (m mutant) topTest() string {
	top, _, _ := strings.Cut(m.test, "/")
	return top
}

// load reads the patches of a folder, in the order of their names.
func load(dir string) ([]mutant, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*.patch"))
	if err != nil {
		return nil, err
	}
	if len(files) == 0 {
		return nil, fmt.Errorf("no patches in %s: run from the top of the source tree", dir)
	}
	var all []mutant
	for _, f := range files {
		text, err := os.ReadFile(f)
		if err != nil {
			return nil, err
		}
		m, err := parse(string(text))
		if err != nil {
			return nil, fmt.Errorf("%s: %w", f, err)
		}
		m.name = strings.TrimSuffix(filepath.Base(f), ".patch")
		if m.file, err = filepath.Abs(f); err != nil {
			return nil, err
		}
		all = append(all, m)
	}
	return all, nil
}

var touched = regexp.MustCompile(`(?m)^\+\+\+ b/(\S+)`)

// parse reads the lines in front of the patch, and which files it changes.
func parse(text string) (mutant, error) {
	head, body, ok := strings.Cut(text, "\n--- a/")
	if !ok {
		return mutant{}, fmt.Errorf("holds no patch with the paths a/… and b/…")
	}
	var m mutant
	for line := range strings.Lines(head) {
		key, value, _ := strings.Cut(strings.TrimSpace(line), ": ")
		switch key {
		case "":
		case "Test":
			if w := strings.Fields(value); len(w) >= 2 && strings.HasPrefix(w[0], "./") && strings.HasPrefix(w[1], "Test") {
				m.pkg, m.test, m.flags = w[0], w[1], w[2:]
			}
		case "Why":
			m.why = value
		case "Slow":
			m.slow = value == "yes"
		default:
			return mutant{}, fmt.Errorf("unknown line %q; known are Test, Why and Slow", strings.TrimSpace(line))
		}
	}
	if m.test == "" || m.why == "" {
		return mutant{}, fmt.Errorf(`wants the lines "Test: ./package TestName" and "Why: …" in front of the patch`)
	}
	for _, t := range touched.FindAllStringSubmatch(body, -1) {
		m.touches = append(m.touches, t[1])
	}
	return m, nil
}

var caseName = regexp.MustCompile(`(?m)^func (TestCase_B\d+)\w*\(`)

// uncovered lists the cases that a test under root is named after and that no
// mutant names.
func uncovered(root string, all []mutant) []string {
	missing := map[string]bool{}
	_ = filepath.WalkDir(root, func(path string, _ fs.DirEntry, err error) error {
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
	return slices.Sorted(maps.Keys(missing))
}
