package arrows

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

var (
	namedTest = regexp.MustCompile("`([a-z]+)\\.((?:Test|Fuzz|Benchmark)\\w+)`")
	declared  = regexp.MustCompile(`(?m)^func ((?:Test|Fuzz|Benchmark)\w+)\(`)
	caseOf    = regexp.MustCompile(`^TestCase_(B\d+)_`)
)

// tests are all tests of the tree, as folder.Name.
func tests(t *testing.T) map[string]bool {
	t.Helper()
	all := map[string]bool{}
	err := filepath.WalkDir("../..", func(path string, d os.DirEntry, err error) error {
		if err != nil || !strings.HasSuffix(path, "_test.go") {
			return err
		}
		text, err := os.ReadFile(path)
		for _, m := range declared.FindAllSubmatch(text, -1) {
			all[filepath.Base(filepath.Dir(path))+"."+string(m[1])] = true
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

// What the requirements page claims is proven by tests that exist, and every
// case that has a test stands on the page.
func TestRequirementsNameTests(t *testing.T) {
	page, err := os.ReadFile("../../docs/requirements.md")
	if err != nil {
		t.Fatal(err)
	}
	all := tests(t)
	named := namedTest.FindAllSubmatch(page, -1)
	if len(named) < 50 {
		t.Errorf("only %d tests are named: has the page another form?", len(named))
	}
	for _, m := range named {
		if name := string(m[1]) + "." + string(m[2]); !all[name] {
			t.Errorf("docs/requirements.md names %s, which does not exist", name)
		}
	}
	for name := range all {
		_, test, _ := strings.Cut(name, ".")
		if m := caseOf.FindStringSubmatch(test); m != nil && !strings.Contains(string(page), "| "+m[1]+" |") {
			t.Errorf("%s: docs/requirements.md has no row %s", name, m[1])
		}
	}
}
