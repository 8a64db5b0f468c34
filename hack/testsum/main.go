// Command testsum runs "go test -json" with its arguments, shows what a person
// wants to see of it, and ends with one line "N passed, N failed, N skipped".
//
// With CI=true a skipped test counts as failed: what CI cannot run, nobody
// knows to work.
package main

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"strings"
)

// event is one line of go test -json (see "go doc test2json").
type event struct {
	Action  string
	Package string
	Test    string
	Elapsed float64
	Output  string
}

// shown are output lines worth seeing of a passing test too: figures with their
// goals.
var shown = regexp.MustCompile(`\(goal .*\) (ok|missed)$`)

type summary struct {
	out                     io.Writer
	passed, failed, skipped int
	output                  map[string][]string // by package and test, until it ends
}

func main() {
	code, err := run(os.Args[1:], os.Stdout)
	if err != nil {
		fmt.Fprintln(os.Stderr, "testsum:", err)
		code = 2
	}
	os.Exit(code)
}

func run(args []string, out io.Writer) (int, error) {
	tables, err := os.CreateTemp("", "kasway-tables-")
	if err != nil {
		return 0, err
	}
	defer func() { _, _ = tables.Close(), os.Remove(tables.Name()) }()
	cmd := exec.Command("go", append([]string{"test", "-json"}, args...)...)
	cmd.Stderr = os.Stderr
	// Where tests append tables that are worth seeing, such as the matrix of
	// modes.
	cmd.Env = append(os.Environ(), "KASWAY_MATRIX_OUT="+tables.Name())
	pipe, err := cmd.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := cmd.Start(); err != nil {
		return 0, err
	}
	s := &summary{out: out, output: map[string][]string{}}
	s.read(pipe)
	err = cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		return 0, err
	}
	if err != nil && s.failed == 0 {
		s.failed++ // it did not build, or a package died outside of a test
	}
	text, err := io.ReadAll(tables)
	if err != nil {
		return 0, err
	}
	s.printf("%s", text)
	return s.close(os.Getenv("CI") == "true"), nil
}

// printf drops an error of the output: nobody would be there to read of it.
func (s *summary) printf(format string, a ...any) { _, _ = fmt.Fprintf(s.out, format, a...) }

func (s *summary) read(r io.Reader) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 16<<20)
	for lines.Scan() {
		var e event
		if err := json.Unmarshal(lines.Bytes(), &e); err != nil {
			s.printf("%s\n", lines.Text())
			continue
		}
		s.take(e)
	}
}

func (s *summary) take(e event) {
	key := e.Package + " " + e.Test
	switch e.Action {
	case "output":
		if line := strings.TrimRight(e.Output, "\n"); shown.MatchString(line) {
			s.printf("%s\n", strings.TrimSpace(line))
		}
		s.output[key] = append(s.output[key], e.Output)
		return
	case "build-output":
		s.printf("%s", e.Output)
	case "pass":
		s.count(e, &s.passed, "ok")
	case "skip":
		if e.Test != "" {
			s.skipped++
			s.dump("SKIP", e, key)
		}
	case "fail":
		s.count(e, &s.failed, "FAIL")
		s.dump("FAIL", e, key)
	default:
		return
	}
	delete(s.output, key)
}

func (s *summary) count(e event, n *int, word string) {
	if e.Test != "" {
		*n++
		return
	}
	s.printf("%-4s %s %.1fs\n", word, e.Package, e.Elapsed)
}

func (s *summary) dump(word string, e event, key string) {
	s.printf("--- %s %s %s\n", word, e.Package, e.Test)
	for _, line := range s.output[key] {
		s.printf("    %s", line)
	}
}

func (s *summary) close(strict bool) int {
	if strict && s.skipped > 0 {
		s.printf("%d skipped tests count as failed here\n", s.skipped)
		s.failed += s.skipped
		s.skipped = 0
	}
	s.printf("%d passed, %d failed, %d skipped\n", s.passed, s.failed, s.skipped)
	if s.failed > 0 {
		return 1
	}
	return 0
}
