package rules

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

// target makes a Target of texts that ParseAddress reads.
func target(t testing.TB, name string, addresses ...string) Target {
	t.Helper()
	out := Target{Name: name}
	for _, s := range addresses {
		a, err := ParseAddress(s)
		if err != nil {
			t.Fatal(err)
		}
		out.Addresses = append(out.Addresses, a)
	}
	return out
}

func exact(t Target) Target { t.Exact = true; return t }

func listen(t Target, port uint16) Target { t.Listen = port; return t }

func TestCheck(t *testing.T) {
	many := make([]Target, MaxTargets+1)
	for i := range many {
		many[i] = target(t, fmt.Sprintf("t%d", i), fmt.Sprintf("10.0.0.%d:443", i+1))
	}
	crowded := Target{Name: "kas"}
	for i := range MaxAddresses + 1 {
		crowded.Addresses = append(crowded.Addresses, target(t, "", fmt.Sprintf("10.0.%d.%d:443", i/250, i%250+1)).Addresses...)
	}
	wide := exact(Target{Name: "kas", Addresses: crowded.Addresses[:MaxTargets+1]})
	for _, tc := range []struct {
		name    string
		targets []Target
		want    []string // "target address field: part of the text"
	}{
		{"one", []Target{target(t, "kas", "10.96.0.1:443", "[fd00::1]:443", "kas.example:443", "10.9.0.0/16:6443")}, nil},
		{"other port", []Target{target(t, "a", "10.9.0.0/16:6443"), target(t, "b", "10.9.0.1:443", "kas:1"), target(t, "c", "kas:2")}, nil},
		{"names", []Target{target(t, "", "a:1"), target(t, "Kas", "b:1"), target(t, "-a", "c:1"), target(t, SelfTestName, "d:1"), target(t, strings.Repeat("a", 254), "e:1"), target(t, strings.Repeat("a", 253), "f:1"), target(t, "[fd00::1]:443", "g:1")},
			[]string{`0 -1 name: "" is not a name`, `1 -1 name: "Kas" is not`, `2 -1 name: "-a" is not`, `3 -1 name: the agent's own`, `4 -1 name: 1-253 of`}},
		{"same name", []Target{target(t, "a", "a:1"), target(t, "b", "b:1"), target(t, "a", "c:1")}, []string{`2 -1 name: "a" is the name of target 1 as well`}},
		{"no address", []Target{target(t, "a")}, []string{"0 -1 addresses: missing"}},
		{"a port is enough", []Target{listen(target(t, "a"), 6443)}, nil},
		{"same port", []Target{listen(target(t, "a"), 1), listen(target(t, "b"), 2), listen(target(t, "c"), 1)}, []string{`2 -1 listen: port 1 is the one of target "a" as well`}},
		{"within prefix", []Target{target(t, "a", "10.9.0.0/16:6443"), target(t, "b", "10.0.0.1:6443", "10.9.3.1:6443")},
			[]string{`1 1 addresses: 10.9.3.1:6443 of target "b" overlaps 10.9.0.0/16:6443 of target "a"`}},
		{"around address", []Target{target(t, "a", "[fd00::1]:6443"), target(t, "b", "[fd00::/64]:6443")}, []string{`1 0 addresses: [fd00::/64]:6443 of target "b" overlaps [fd00::1]:6443 of target "a"`}},
		{"same host", []Target{target(t, "a", "kas.example:443"), target(t, "b", "KAS.example.:443")}, []string{`1 0 addresses: overlaps kas.example:443 of target "a"`}},
		{"twice", []Target{target(t, "a", "10.0.0.1:443", "10.0.0.2:443", "10.0.0.1:443")}, []string{"0 2 addresses: of the same target"}},
		{"unread address", []Target{{Name: "a", Addresses: []Address{{}, {}}}, exact(Target{Name: "b", Addresses: []Address{{}}})}, nil},
		{"exact prefix", []Target{exact(target(t, "a", "10.0.0.1:443", "10.9.0.0/16:443"))}, []string{"0 1 addresses: 10.9.0.0/16:443 is a prefix"}},
		{"exact by its own name", []Target{exact(target(t, "10.0.0.1:443", "10.0.0.1:443"))}, nil},
		{"exact by another's name", []Target{target(t, "10.0.0.1:443", "10.0.0.9:443"), exact(target(t, "b", "10.0.0.1:443"))}, []string{`1 0 addresses: "10.0.0.1:443" is the name of target 1`}},
		{"exact on one port", []Target{listen(exact(target(t, "a", "a:1", "b:1")), 6443)}, []string{"0 -1 listen: 2 exact addresses"}},
		{"exact without address", []Target{listen(exact(target(t, "a")), 6443)}, []string{"0 -1 addresses: missing"}},
		{"too many targets", many, []string{"-1 -1 : 65 targets"}},
		{"most targets", many[1:], nil},
		{"too many exact", []Target{wide}, []string{"-1 -1 : 65 targets"}},
		{"too many addresses", []Target{crowded}, []string{"-1 -1 : 257 addresses"}},
		{"most addresses", []Target{{Name: "kas", Addresses: crowded.Addresses[1:]}}, nil},
	} {
		t.Run(tc.name, func(t *testing.T) {
			got := Check(tc.targets)
			if len(got) != len(tc.want) {
				t.Fatalf("got %+v, want %q", got, tc.want)
			}
			for i, p := range got {
				at, text, _ := strings.Cut(tc.want[i], ": ")
				if fmt.Sprintf("%d %d %s", p.Target, p.Address, p.Field) != at || !strings.Contains(p.Text, text) {
					t.Errorf("got %+v, want %q", p, tc.want[i])
				}
			}
		})
	}
}

func TestExpand(t *testing.T) {
	group := target(t, "kas", "10.96.0.1:443", "[fd00::1]:443")
	got := Expand([]Target{group, exact(target(t, "others", "10.0.0.1:443", "[FD00::2]:443", "Kas.example:6443")), listen(exact(target(t, "last", "a:1")), 7)})
	want := []Target{
		group,
		target(t, "10.0.0.1:443", "10.0.0.1:443"),
		target(t, "[fd00::2]:443", "[fd00::2]:443"),
		target(t, "kas.example:6443", "kas.example:6443"),
		listen(target(t, "a:1", "a:1"), 7),
	}
	if diff := cmp.Diff(want, got, cmp.Comparer(func(a, b Address) bool { return a == b })); diff != "" {
		t.Error(diff)
	}
	if diff := cmp.Diff(got, Expand(got), cmp.Comparer(func(a, b Address) bool { return a == b })); diff != "" {
		t.Errorf("expanded again: %s", diff)
	}
	if problems := Check(got); len(problems) > 0 {
		t.Error(problems)
	}
}
