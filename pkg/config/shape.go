package config

import (
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"
)

// shape is what a value must look like, and where it goes.
type shape struct {
	// read checks v, stores it, and reports to d what is wrong.
	read func(d *decoder, v value)
	// fields of an object, or of the objects of a list; nil otherwise.
	fields fields
	// tag is YAML's type of a scalar, or of the scalars of a list.
	tag  string
	list bool
}

// fields are the shapes of an object's fields by name.
type fields map[string]shape

// at finds the shape of a field by its path, which holds no index.
func (f fields) at(path string) shape {
	name, rest, deeper := strings.Cut(path, ".")
	if s := f[name]; deeper {
		return s.fields.at(rest)
	} else {
		return s
	}
}

// object is a mapping of known fields, each at most once. A field without a
// value is taken as not written.
func object(f fields) shape {
	return shape{fields: f, read: func(d *decoder, v value) {
		if v.node.Kind != yaml.MappingNode {
			d.fail(v, "found %s; allowed: the fields %s", describe(v.node), names(f))
			return
		}
		first := map[string]int{}
		for i := 0; i+1 < len(v.node.Content); i += 2 {
			key, node := v.node.Content[i], v.node.Content[i+1]
			at := v.field(label(key), node)
			if at.at.flag == "" {
				at.at.line = key.Line // where people look; the value may stand below
			}
			s, known := f[key.Value]
			line, again := first[key.Value]
			switch {
			case key.Kind != yaml.ScalarNode || !known:
				d.fail(at, "unknown field%s allowed: %s", suggest(key.Value, f), names(f))
			case again:
				d.fail(at, "written twice, first on line %d; keep one", line)
			case node.ShortTag() == "!!null":
				d.places[at.path] = at.at
			default:
				d.read(s, at)
			}
			if !again {
				first[key.Value] = key.Line
			}
		}
	}}
}

// list is a sequence, whose elements elem gives shape and defaults.
func list[T any](dst *[]T, elem func(*T) shape) shape {
	sample := elem(new(T))
	return shape{fields: sample.fields, tag: sample.tag, list: true, read: func(d *decoder, v value) {
		if v.node.Kind != yaml.SequenceNode {
			d.fail(v, "found %s; allowed: a list, in brackets or with a dash before each", describe(v.node))
			return
		}
		out := make([]T, len(v.node.Content))
		for i := range out {
			d.read(elem(&out[i]), v.index(i))
		}
		*dst = out
	}}
}

// scalar is a single value of the given YAML type; allowed says in words what
// parse accepts.
func scalar[T any](dst *T, tag, allowed string, parse func(string) (T, error)) shape {
	return shape{tag: tag, read: func(d *decoder, v value) {
		if v.node.Kind != yaml.ScalarNode || v.node.ShortTag() != tag {
			d.fail(v, "found %s; allowed: %s", describe(v.node), allowed)
			return
		}
		parsed, err := parse(v.node.Value)
		if err != nil {
			d.fail(v, "%v", err)
			return
		}
		*dst = parsed
	}}
}

// text is a scalar that YAML reads as text.
func text[T any](dst *T, parse func(string) (T, error)) shape {
	return scalar(dst, "!!str", "a text (put it in quotes)", parse)
}

func boolean(dst *bool) shape {
	return scalar(dst, "!!bool", "true or false", func(s string) (bool, error) {
		b, err := strconv.ParseBool(strings.ToLower(s))
		if err != nil {
			err = fmt.Errorf("found %q; allowed: true or false", s)
		}
		return b, err
	})
}

// reserved is a field that is known and not allowed, because why.
func reserved(why string) shape {
	return shape{read: func(d *decoder, v value) { d.fail(v, "%s", why) }}
}

var plainKey = regexp.MustCompile(`^[A-Za-z][A-Za-z0-9_-]{0,63}$`)

// label is a key as part of a path.
func label(key *yaml.Node) string {
	if key.Kind == yaml.ScalarNode && plainKey.MatchString(key.Value) {
		return key.Value
	}
	return fmt.Sprintf("%.64q", key.Value)
}

func names(f fields) string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		if f[name].tag != "" || f[name].list || f[name].fields != nil {
			out = append(out, name) // all but the reserved
		}
	}
	return strings.Join(out, ", ")
}

// describe says what a node is, for people.
func describe(n *yaml.Node) string {
	switch n.Kind {
	case yaml.MappingNode:
		return "a section of fields"
	case yaml.SequenceNode:
		return "a list"
	}
	switch tag := n.ShortTag(); tag {
	case "!!str":
		return fmt.Sprintf("the text %.64q", n.Value)
	case "!!int", "!!float":
		return fmt.Sprintf("the number %.64s", n.Value)
	case "!!bool", "!!timestamp":
		return fmt.Sprintf("%.64s, which YAML does not read as a text", n.Value)
	case "!!null":
		return "nothing"
	default:
		return fmt.Sprintf("%.64q with the tag %.64q", n.Value, tag)
	}
}
