package config

import (
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"go.yaml.in/yaml/v3"

	"github.com/kasway/kasway/pkg/rules"
)

// In an example, "#field:" is a setting to be taken into use, "# text" prose.
var setting = regexp.MustCompile(`(?m)^( *)#([A-Za-z0-9]+:)`)

func example(t *testing.T, name string) (asIs, all []byte) {
	t.Helper()
	data, err := os.ReadFile("../../examples/" + name)
	if err != nil {
		t.Fatal(err)
	}
	return data, setting.ReplaceAll(data, []byte("$1$2"))
}

// paths lists every field of a schema by its path.
func paths(prefix string, f fields) []string {
	var out []string
	for _, name := range slices.Sorted(maps.Keys(f)) {
		switch s := f[name]; {
		case s.fields != nil:
			out = append(out, paths(prefix+name+".", s.fields)...)
		case s.tag != "" || s.list:
			out = append(out, prefix+name)
		}
	}
	return out
}

// written lists the fields of a file by their paths, without indices.
func written(prefix string, n *yaml.Node) []string {
	var out []string
	switch n.Kind {
	case yaml.MappingNode:
		for i := 0; i < len(n.Content); i += 2 {
			out = append(out, written(prefix+"."+n.Content[i].Value, n.Content[i+1])...)
		}
		return out
	case yaml.SequenceNode:
		if len(n.Content) > 0 && n.Content[0].Kind == yaml.MappingNode {
			for _, e := range n.Content {
				out = append(out, written(prefix, e)...)
			}
			return out
		}
	}
	return []string{strings.TrimPrefix(prefix, ".")}
}

// testExample checks that an example loads, that it holds every field, and that
// what it shows as default is the default.
func testExample[T any](t *testing.T, doc *document[T], name string) T {
	t.Helper()
	asIs, all := example(t, name)
	loaded, err := doc.parse(name, asIs, nil)
	if err != nil {
		t.Fatal(err)
	}
	node, err := parseYAML(all)
	if err != nil {
		t.Fatal(err)
	}
	var c T
	want := paths("", doc.root(&c).fields)
	got := written("", node)
	slices.Sort(want)
	slices.Sort(got)
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("fields of the schema (-) and of %s (+): %s", name, diff)
	}
	return loaded
}

// taken decodes an example with all its commented settings, unchecked.
func taken[T any](t *testing.T, doc *document[T], name string) T {
	t.Helper()
	_, all := example(t, name)
	c := doc.defaults()
	d := newDecoder()
	if !d.file(name, all, doc.root(&c)) || d.err() != nil {
		t.Fatal(d.err())
	}
	return c
}

func TestExampleAgent(t *testing.T) {
	loaded := testExample(t, agentDocument(), "agent.yaml")
	want := agentDefaults()
	want.Intercept.Clients = rules.Clients{Host: true, Pods: true}
	if diff := cmp.Diff(want.Intercept, loaded.Intercept); diff != "" {
		t.Errorf("intercept as loaded: %s", diff)
	}
	if len(loaded.Targets) != 1 || len(loaded.Targets[0].Addresses) != 4 {
		t.Errorf("targets as loaded: %+v", loaded.Targets)
	}
	all := taken(t, agentDocument(), "agent.yaml")
	want.Intercept.BindAddress, want.Intercept.Uplinks = "169.254.77.2", []string{}
	if diff := cmp.Diff(want.Intercept, all.Intercept); diff != "" {
		t.Errorf("shown as defaults of intercept: %s", diff)
	}
	if diff := cmp.Diff(want.Observe, all.Observe); diff != "" {
		t.Errorf("shown as defaults of observe: %s", diff)
	}
	if all.Links.ServerName != "" || all.Identity.Name != "" || all.Targets[0].Exact {
		t.Errorf("shown as defaults: %+v %+v %+v", all.Links, all.Identity, all.Targets)
	}
}

func TestExampleServer(t *testing.T) {
	testExample(t, serverDocument(), "server.yaml")
	all, want := taken(t, serverDocument(), "server.yaml"), serverDefaults()
	if diff := cmp.Diff(want.Listen, all.Listen); diff != "" {
		t.Errorf("shown as defaults of listen: %s", diff)
	}
	if diff := cmp.Diff(want.Observe, all.Observe); diff != "" {
		t.Errorf("shown as defaults of observe: %s", diff)
	}
	if all.Upstreams[0].DialTimeout != defaultDialTimeout {
		t.Errorf("shown as default: dialTimeout: %s", all.Upstreams[0].DialTimeout)
	}
}
