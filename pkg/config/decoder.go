package config

import (
	"fmt"
	"slices"
	"strings"

	"go.yaml.in/yaml/v3"
)

// place is where a value was written: a line of a file, or a flag.
type place struct {
	file string
	line int
	flag string
}

// decoder reads one configuration. It goes on after a problem, so that all of
// them are told at once, and remembers where each value was written, so that
// what is wrong with several values together has a place as well.
type decoder struct {
	places   map[string]place  // by path; "" is the whole file
	values   map[string]bool   // paths that have a value
	flags    map[string]string // path → the flag that sets it, for remedies
	problems []Problem
}

func newDecoder() *decoder {
	return &decoder{places: map[string]place{}, values: map[string]bool{}, flags: map[string]string{}}
}

// value is a node to be read and the path it stands at.
type value struct {
	node *yaml.Node
	path string
	at   place
}

// child is a value below v; node decides the line.
func (v value) child(path string, node *yaml.Node) value {
	at := v.at
	if at.flag == "" {
		at.line = node.Line
	}
	return value{node: node, path: path, at: at}
}

func (v value) field(name string, node *yaml.Node) value {
	if v.path != "" {
		name = v.path + "." + name
	}
	return v.child(name, node)
}

func (v value) index(i int) value {
	return v.child(fmt.Sprintf("%s[%d]", v.path, i), v.node.Content[i])
}

// read lets s read v and remembers its place.
func (d *decoder) read(s shape, v value) {
	d.places[v.path], d.values[v.path] = v.at, true
	if v.node.Kind == yaml.AliasNode {
		d.fail(v, "found the alias *%s; aliases are not supported: write the value out, or put a text that begins with * in quotes", v.node.Value)
		return
	}
	s.read(d, v)
}

func (d *decoder) fail(v value, format string, a ...any) {
	d.add(v.at, v.path, fmt.Sprintf(format, a...))
}

func (d *decoder) add(at place, path, text string) {
	d.problems = append(d.problems, Problem{File: at.file, Line: at.line, Flag: at.flag, Path: path, Text: text})
}

// reject reports a problem that only shows when several values are seen
// together, or one is missing. It says nothing about what was told already.
func (d *decoder) reject(path, format string, a ...any) {
	if d.clean(path) {
		d.add(d.place(path), path, fmt.Sprintf(format, a...))
	}
}

// missing reports that a value is required, and its flag if there is one.
func (d *decoder) missing(path, remedy string) {
	if flag := d.flags[path]; flag != "" {
		remedy += " (or --" + flag + ")"
	}
	d.reject(path, "missing; %s", remedy)
}

// clean reports whether no problem was found yet at path, above or below it.
func (d *decoder) clean(path string) bool {
	return !slices.ContainsFunc(d.problems, func(p Problem) bool {
		return within(p.Path, path) || within(path, p.Path)
	})
}

// place is where path was written, or the nearest thing around it. It is the
// zero place if nothing was read from a file or flag.
func (d *decoder) place(path string) place {
	for {
		if at, ok := d.places[path]; ok || path == "" {
			return at
		}
		path = parent(path)
	}
}

func parent(path string) string {
	return path[:max(strings.LastIndexAny(path, ".["), 0)]
}

// within reports whether inner is outer or below it. Problems of the file as a
// whole, with the empty path, stand for themselves.
func within(inner, outer string) bool {
	rest, ok := strings.CutPrefix(inner, outer)
	return ok && (rest == "" || outer != "" && (rest[0] == '.' || rest[0] == '['))
}

// forget drops the places at and below path, before a flag replaces its value.
func (d *decoder) forget(path string) {
	for p := range d.places {
		if within(p, path) {
			delete(d.places, p)
			delete(d.values, p)
		}
	}
}

// err is nil or an *Error.
func (d *decoder) err() error {
	if len(d.problems) == 0 {
		return nil
	}
	sortProblems(d.problems)
	return &Error{Problems: d.problems}
}
