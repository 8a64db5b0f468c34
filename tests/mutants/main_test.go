package main

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Every patch still applies, changes code of the product, and names a test that
// is there: a fault that cannot be tried proves nothing.
func TestPatches(t *testing.T) {
	all, err := load(".")
	if err != nil {
		t.Fatal(err)
	}
	const top = "../.."
	for _, m := range all {
		t.Run(m.name, func(t *testing.T) {
			args := applying(m)
			cmd := exec.Command("git", slices.Insert(args, 1, "--check")...)
			cmd.Dir = top
			if out, err := cmd.CombinedOutput(); err != nil {
				t.Errorf("it does not apply any more: make it anew\n%s", out)
			}
			for _, f := range m.touches {
				if strings.HasSuffix(f, "_test.go") || strings.HasPrefix(f, "tests/") {
					t.Errorf("%s is a test, not the product", f)
				}
			}
			if len(m.touches) == 0 {
				t.Error("it changes nothing")
			}
			tests, err := filepath.Glob(filepath.Join(top, m.pkg, "*_test.go"))
			if err != nil {
				t.Fatal(err)
			}
			named := regexp.MustCompile(`(?m)^func ` + m.topTest() + `\(t \*testing\.T\)`)
			if !slices.ContainsFunc(tests, func(f string) bool {
				text, err := os.ReadFile(f)
				return err == nil && named.Match(text)
			}) {
				t.Errorf("%s has no %s", m.pkg, m.topTest())
			}
		})
	}
}

func TestParse(t *testing.T) {
	const body = "\n--- a/x.go\n+++ b/x.go\n@@ -1 +1 @@\n-a\n+b\n--- a/y/z.go\n+++ b/y/z.go\n@@ -1 +1 @@\n-a\n+b\n"
	m, err := parse("Test: ./pkg/x TestX/sub -race -tags kube\nWhy: it hangs: badly\nSlow: yes\n" + body)
	if err != nil {
		t.Fatal(err)
	}
	if m.pkg != "./pkg/x" || m.test != "TestX/sub" || m.topTest() != "TestX" || m.why != "it hangs: badly" || !m.slow ||
		!slices.Equal(m.flags, []string{"-race", "-tags", "kube"}) || !slices.Equal(m.touches, []string{"x.go", "y/z.go"}) {
		t.Errorf("%+v", m)
	}
	for name, text := range map[string]string{
		"no test": "Why: x\n" + body, "no reason": "Test: ./x TestX\n" + body, "no patch": "Test: ./x TestX\nWhy: x\n",
		"no package": "Test: TestX\nWhy: x\n" + body, "misspelt": "Test: ./x TestX\nWhy: x\nSlwo: yes\n" + body,
	} {
		if m, err := parse(text); err == nil {
			t.Errorf("%s: taken as %+v", name, m)
		}
	}
}

func TestChoose(t *testing.T) {
	var all []mutant
	for i := range 3 * few {
		all = append(all, mutant{name: string(rune('A' + i)), slow: i%3 == 0})
	}
	quick, err := choose(all, false, nil)
	if err != nil || len(quick) != few || slices.ContainsFunc(quick, func(m mutant) bool { return m.slow }) {
		t.Errorf("by default: %v, %v", quick, err)
	}
	if quick[0].name != "B" || quick[few-1].name < all[len(all)-6].name {
		t.Errorf("no spread over all: %v", quick)
	}
	if every, err := choose(all, true, nil); err != nil || len(every) != len(all) {
		t.Errorf("all: %d, %v", len(every), err)
	}
	if named, err := choose(all, false, []string{"A.patch", "C"}); err != nil || len(named) != 2 || named[0].name != "A" || named[1].name != "C" {
		t.Errorf("named: %v, %v", named, err)
	}
	if _, err := choose(all, true, []string{"nobody"}); err == nil {
		t.Error("a name that is no patch's is taken")
	}
}

func TestUncovered(t *testing.T) {
	dir := t.TempDir()
	write(t, dir, map[string]string{
		"a/x_test.go": "func TestCase_B01_One(t *testing.T) {\nfunc TestCase_B02_Two(t *testing.T) {\nfunc TestOther(t *testing.T) {\n",
		"b/x.go":      "func TestCase_B03_NoTestFile(t *testing.T) {\n",
	})
	if got := uncovered(dir, []mutant{{test: "TestCase_B02_AnyOther"}, {test: "TestOther"}}); !slices.Equal(got, []string{"TestCase_B01"}) {
		t.Errorf("without a mutant: %v", got)
	}
}

func TestJudge(t *testing.T) {
	exit := errors.New("exit status 1")
	for _, c := range []struct {
		output string
		err    error
		want   string
	}{
		{"--- FAIL: TestX (0.01s)\nFAIL\n", exit, noticed},
		{"=== RUN TestX\npanic: test timed out after 3m0s\n", exit, noticed},
		{"--- PASS: TestX (0.01s)\ngoleak: Errors on successful test run: found unexpected goroutines\n", exit, noticed},
		{"--- PASS: TestX (0.01s)\nPASS\n", nil, survived},
		{"testing: warning: no tests to run\nPASS\n", nil, noTest},
		{"--- SKIP: TestX (0.00s)\nPASS\n", nil, skipped},
		{"# kasway\n./x.go:1:2: syntax error\nFAIL\tkasway [build failed]\n", exit, noBuild},
		{"run these tests as root\nFAIL\n", exit, unclear},
	} {
		if got := judge([]byte(c.output), c.err); got != c.want {
			t.Errorf("%q: %s, want %s", c.output, got, c.want)
		}
	}
}

// The whole way, over a module of two lines: what is noticed passes, what
// survives, does not build or does not apply fails, and the tree is whole again.
func TestTry(t *testing.T) {
	dir := t.TempDir()
	const product = "package x\n\nfunc Two() int { return 2 }\n\nfunc Three() int { return 3 }\n"
	write(t, dir, map[string]string{
		"go.mod": "module x\n\ngo 1.26\n", "x.go": product,
		"x_test.go": "package x\n\nimport \"testing\"\n\nfunc TestTwo(t *testing.T) {\n\tif Two() != 2 {\n\t\tt.Error(Two())\n\t}\n}\n\nfunc TestBroken(t *testing.T) { t.Error() }\n",
	})
	patch := func(name, test, old, fault string) mutant {
		file := filepath.Join(t.TempDir(), name)
		text := "Test: . " + test + "\nWhy: x\n\n--- a/x.go\n+++ b/x.go\n@@ -1,5 +1,5 @@\n package x\n \n"
		for line := range strings.Lines(strings.TrimPrefix(product, "package x\n\n")) {
			if strings.Contains(line, old) {
				text += "-" + line + "+" + strings.Replace(line, old, fault, 1)
			} else {
				text += " " + line
			}
		}
		write(t, filepath.Dir(file), map[string]string{name: text})
		return mutant{name: name, file: file, pkg: ".", test: test, touches: []string{"x.go"}}
	}
	scratch, said := &tree{dir}, bytes.Buffer{}
	stale := patch("stale", "TestTwo", "2 }", "4 }")
	write(t, filepath.Dir(stale.file), map[string]string{"stale": "--- a/x.go\n+++ b/x.go\n@@ -1,3 +1,3 @@\n package y\n-gone\n+here\n package z\n"})
	for _, c := range []struct {
		m      mutant
		passes bool
	}{
		{patch("noticed", "TestTwo", "2 }", "4 }"), true},
		{patch("survives", "TestTwo", "3 }", "4 }"), false},
		{patch("does-not-build", "TestTwo", "2 }", "two }"), false},
		{patch("no-such-test", "TestNobody", "2 }", "4 }"), false},
		{stale, false},
	} {
		got := tally{out: &said}
		if err := scratch.try(t.Context(), &got, c.m, ""); err != nil {
			t.Fatal(err)
		}
		if got.passed+got.failed+got.skipped != 1 || (got.passed == 1) != c.passes || got.skipped > 0 {
			t.Errorf("%s: %d passed, %d failed, %d skipped: %s", c.m.name, got.passed, got.failed, got.skipped, &said)
		}
		if now, err := os.ReadFile(filepath.Join(dir, "x.go")); err != nil || string(now) != product {
			t.Errorf("%s is left in the tree: %q, %v", c.m.name, now, err)
		}
	}
	sound, err := scratch.sound(t.Context(), &tally{out: &said}, []mutant{{pkg: ".", test: "TestTwo"}, {pkg: ".", test: "TestBroken"}})
	if err != nil || len(sound) != 1 || sound["TestBroken"] == "" {
		t.Errorf("not sound: %v, %v", sound, err)
	}
}

func write(t *testing.T, dir string, files map[string]string) {
	t.Helper()
	for name, text := range files {
		path := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
}
