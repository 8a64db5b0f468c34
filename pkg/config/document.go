package config

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
)

// document is everything about one kind of configuration; the code that reads,
// overrides and reports is the same for all.
type document[T any] struct {
	kind     string
	path     string // read if it exists and no other file is named
	defaults func() T
	fields   func(*T) fields
	flags    []flag[T]
	// check looks at what several values mean together.
	check func(*decoder, *T)
}

// overrides are the flags of a command line, as they were given.
type overrides struct {
	config string
	asked  func() bool // --config was given
	values map[string]*flagValue
}

// load reads the file, lets the flags override it and checks the whole.
func (doc *document[T]) load(o *overrides) (T, error) {
	var none T
	name := doc.path
	if o.asked() {
		name = o.config
	}
	data, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) && !o.asked() {
		return doc.parse("", nil, o)
	}
	if err != nil {
		p := Problem{Text: fmt.Sprintf("cannot read the configuration: %v", err)}
		if o.asked() {
			p.Flag = "config"
		}
		return none, &Error{Problems: []Problem{p}}
	}
	return doc.parse(name, data, o)
}

// parse is load for a file that was read; name is empty if there is none. o may
// be nil.
func (doc *document[T]) parse(name string, data []byte, o *overrides) (T, error) {
	var none T
	c := doc.defaults()
	d := newDecoder()
	for _, f := range doc.flags {
		d.flags[f.path] = f.name
	}
	if name != "" {
		if !d.file(name, data, doc.root(&c)) {
			return none, d.err()
		}
		if !doc.header(d) {
			return none, d.err()
		}
	}
	if o != nil {
		for _, f := range doc.flags {
			f.apply(d, doc.fields(&c), &c, o.values[f.name])
		}
	}
	doc.check(d, &c)
	if err := d.err(); err != nil {
		return none, err
	}
	return c, nil
}

// root is the shape of the whole file.
func (doc *document[T]) root(c *T) shape {
	var ignored string
	f := doc.fields(c)
	f["apiVersion"] = text(&ignored, oneOf(APIVersion))
	f["kind"] = text(&ignored, oneOf(doc.kind))
	return object(f)
}

// header reports whether the file is of this kind and version. If it is of
// another, everything else that was found says nothing.
func (doc *document[T]) header(d *decoder) bool {
	var wrong []Problem
	for _, p := range d.problems {
		if p.Path == "apiVersion" || p.Path == "kind" {
			wrong = append(wrong, p)
		}
	}
	if len(wrong) > 0 {
		d.problems = wrong
		return false
	}
	for _, f := range [][2]string{{"apiVersion", APIVersion}, {"kind", doc.kind}} {
		if !d.values[f[0]] {
			d.reject(f[0], "missing; write %s: %s", f[0], f[1])
		}
	}
	return true
}
