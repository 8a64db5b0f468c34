package main

import (
	"strings"
	"testing"
)

func TestSummary(t *testing.T) {
	const in = `{"Action":"output","Package":"p","Test":"TestA","Output":"D1 cpu 1.1 (goal <= 1.15) ok\n"}
{"Action":"pass","Package":"p","Test":"TestA"}
{"Action":"output","Package":"p","Test":"TestB","Output":"needs root\n"}
{"Action":"skip","Package":"p","Test":"TestB"}
{"Action":"output","Package":"p","Test":"TestC","Output":"boom\n"}
{"Action":"fail","Package":"p","Test":"TestC"}
{"Action":"fail","Package":"p"}
`
	for _, c := range []struct {
		strict bool
		want   string
	}{{false, "1 passed, 1 failed, 1 skipped\n"}, {true, "1 passed, 2 failed, 0 skipped\n"}} {
		var out strings.Builder
		s := &summary{out: &out, output: map[string][]string{}}
		s.read(strings.NewReader(in))
		if code := s.close(c.strict); code != 1 {
			t.Errorf("exit code %d, want 1", code)
		}
		text := out.String()
		if !strings.HasSuffix(text, c.want) {
			t.Errorf("strict=%v ends with %q, want %q", c.strict, text, c.want)
		}
		for _, line := range []string{"D1 cpu 1.1 (goal <= 1.15) ok\n", "    needs root\n", "    boom\n"} {
			if !strings.Contains(text, line) {
				t.Errorf("%q is not shown in %q", line, text)
			}
		}
	}
}
