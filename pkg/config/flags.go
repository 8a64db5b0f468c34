package config

import (
	"strings"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"
)

// flag overrides one field of a document. Its text is read by the field's own
// shape, so that both accept the same.
type flag[T any] struct {
	name  string
	path  string // of the field
	value string // what the flag takes, for --help
	usage string
	// def is the default as the flag would write it; empty: none.
	def string
	// shape reads a form of the field that only the flag has; nil: the field's.
	shape func(*T) shape
}

// apply puts what was given into c.
func (f *flag[T]) apply(d *decoder, all fields, c *T, given *flagValue) {
	if given == nil || len(given.texts) == 0 {
		return
	}
	texts, s := given.texts, all.at(f.path)
	if f.shape != nil {
		s = f.shape(c)
	} else if s.list {
		texts = strings.Split(strings.Join(texts, ","), ",")
	}
	node := scalarNode(s.tag, texts[len(texts)-1])
	if s.list {
		node = &yaml.Node{Kind: yaml.SequenceNode}
		for _, t := range texts {
			node.Content = append(node.Content, scalarNode(s.tag, t))
		}
	}
	d.forget(f.path)
	d.read(s, value{node: node, path: f.path, at: place{flag: f.name}})
}

func scalarNode(tag, text string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: tag, Value: text}
}

// flagValue keeps the texts that a flag was given, unread: what is wrong with
// them is told together with everything else. It is a pflag.Value.
type flagValue struct {
	takes, def string
	texts      []string
}

func (v *flagValue) Set(s string) error { v.texts = append(v.texts, s); return nil }

// Type is what pflag shows as the flag's argument.
func (v *flagValue) Type() string { return v.takes }

func (v *flagValue) String() string {
	if len(v.texts) > 0 {
		return strings.Join(v.texts, ",")
	}
	return v.def
}

// register adds the document's flags to fs.
func (doc *document[T]) register(fs *pflag.FlagSet) *overrides {
	o := &overrides{values: map[string]*flagValue{}}
	fs.StringVarP(&o.config, "config", "f", doc.path, "read this `file`; without the flag, a missing file is no error")
	o.asked = func() bool { return fs.Changed("config") }
	for _, f := range doc.flags {
		v := &flagValue{takes: f.value, def: f.def}
		o.values[f.name] = v
		fs.Var(v, f.name, f.usage)
		if f.value == "bool" {
			fs.Lookup(f.name).NoOptDefVal = "true"
		}
	}
	return o
}
