package config

import (
	"cmp"
	"slices"
	"strconv"
	"strings"
)

// Error is everything found wrong with a configuration. A command that gets one
// exits 2.
type Error struct{ Problems []Problem }

// Error returns one line per problem: those of the file by line, then those of
// flags, then those that stand nowhere.
func (e *Error) Error() string {
	lines := make([]string, len(e.Problems))
	for i, p := range e.Problems {
		lines[i] = p.String()
	}
	return strings.Join(lines, "\n")
}

// Problem is one thing that is wrong, where, and what is allowed instead.
type Problem struct {
	File string // empty: not in a file
	Line int    // in File, from 1
	Flag string // without dashes; empty: not in a flag
	Path string // the field, such as links.servers[0]; empty: the file as a whole
	Text string
}

// String is "file:line: field.path: text" or "--flag: text".
func (p Problem) String() string {
	var b strings.Builder
	switch {
	case p.Flag != "":
		b.WriteString("--" + p.Flag + ": ")
	case p.File != "":
		b.WriteString(p.File + ":")
		if p.Line > 0 {
			b.WriteString(strconv.Itoa(p.Line) + ":")
		}
		b.WriteString(" ")
	}
	if p.Path != "" && p.Flag == "" {
		b.WriteString(p.Path + ": ")
	}
	b.WriteString(p.Text)
	return b.String()
}

func sortProblems(problems []Problem) {
	rank := func(p Problem) int {
		switch {
		case p.Flag != "":
			return 1
		case p.File == "":
			return 2
		}
		return 0
	}
	slices.SortStableFunc(problems, func(a, b Problem) int {
		return cmp.Or(cmp.Compare(rank(a), rank(b)), cmp.Compare(a.Line, b.Line))
	})
}
