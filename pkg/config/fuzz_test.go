package config

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
)

// placed is what every line of an error about a file looks like.
var placed = regexp.MustCompile(`^f\.yaml:[1-9][0-9]*: [^\n]+$`)

func seed(f *testing.F, dir, example string) {
	files, err := filepath.Glob("testdata/" + dir + "/*.yaml")
	if err != nil || len(files) == 0 {
		f.Fatal("no files", err)
	}
	for _, name := range append(files, "../../examples/"+example) {
		data, err := os.ReadFile(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
}

func checkError(t *testing.T, data []byte, err error) {
	t.Helper()
	var e *Error
	if !errors.As(err, &e) || len(e.Problems) == 0 {
		t.Fatalf("%q: %v is no *Error", data, err)
	}
	max := strings.Count(string(data), "\n") + 1 + strings.Count(string(data), "\r") + strings.Count(string(data), "\u0085") +
		strings.Count(string(data), "\u2028") + strings.Count(string(data), "\u2029")
	last := 0
	for _, p := range e.Problems {
		if !placed.MatchString(p.String()) || p.Line > max || p.Line < last {
			t.Fatalf("%q: line %q (after line %d, of %d)", data, p, last, max)
		}
		last = p.Line
	}
}

func FuzzParseAgent(f *testing.F) {
	seed(f, "agent", "agent.yaml")
	f.Add([]byte(minimal))
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<12 {
			return // long ones only take long
		}
		a, err := ParseAgent("f.yaml", data)
		if err != nil {
			checkError(t, data, err)
			return
		}
		if p := rules.Check(a.Targets); len(p) > 0 {
			t.Fatalf("%q: targets %+v: %v", data, a.Targets, p)
		}
		listen := a.Intercept.Mode == ModeListen
		if a.Intercept.Clients == (rules.Clients{}) != listen || listen != (a.Intercept.BindAddress != "") ||
			len(a.Links.Servers) == 0 || a.Identity.CA == "" || a.Intercept.MaxConnections <= 0 || a.Intercept.ResolveInterval <= 0 {
			t.Fatalf("%q is read as %+v", data, a)
		}
	})
}

func FuzzParseServer(f *testing.F) {
	seed(f, "server", "server.yaml")
	f.Fuzz(func(t *testing.T, data []byte) {
		if len(data) > 1<<12 {
			return
		}
		s, err := ParseServer("f.yaml", data)
		if err != nil {
			checkError(t, data, err)
			return
		}
		if s.Identity.CA == "" && !s.Listen.InsecureAgents || s.Identity.Key == "" {
			t.Fatalf("%q is read as %+v", data, s)
		}
		for _, destination := range s.Policy.AllowedDestinations {
			if again, err := hostPort(destination); err != nil || again != destination {
				t.Fatalf("%q: destination %q: %q, %v", data, destination, again, err)
			}
		}
	})
}
