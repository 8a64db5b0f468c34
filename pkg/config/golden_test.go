package config

import (
	"errors"
	stdflag "flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

var update = stdflag.Bool("update", false, "write the golden files anew")

// Every file under testdata is refused, with exactly the lines of the golden
// file beside it.
func TestGoldenAgent(t *testing.T) {
	golden(t, "agent", func(name string, data []byte) error { _, err := ParseAgent(name, data); return err })
}

func TestGoldenServer(t *testing.T) {
	golden(t, "server", func(name string, data []byte) error { _, err := ParseServer(name, data); return err })
}

func golden(t *testing.T, dir string, parse func(string, []byte) error) {
	files, err := filepath.Glob("testdata/" + dir + "/*.yaml")
	if err != nil || len(files) == 0 {
		t.Fatalf("no files: %v", err)
	}
	for _, file := range files {
		t.Run(strings.TrimSuffix(filepath.Base(file), ".yaml"), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			got := lines(t, parse(filepath.Base(file), data))
			name := strings.TrimSuffix(file, ".yaml") + ".golden"
			if *update {
				if err := os.WriteFile(name, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(name)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(strings.Split(string(want), "\n"), strings.Split(got, "\n")); diff != "" {
				t.Error(diff)
			}
		})
	}
}

// lines is the text of an *Error, whose problems are sorted by line.
func lines(t *testing.T, err error) string {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) {
		t.Fatalf("want a *config.Error, got %v", err)
	}
	file := slices.DeleteFunc(slices.Clone(e.Problems), func(p Problem) bool { return p.File == "" })
	if !slices.IsSortedFunc(file, func(a, b Problem) int { return a.Line - b.Line }) {
		t.Errorf("not sorted by line: %v", e)
	}
	return e.Error() + "\n"
}
