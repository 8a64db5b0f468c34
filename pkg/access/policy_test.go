package access

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestCase_B69_Destinations(t *testing.T) {
	for in, want := range map[string]string{
		"kas.example.svc:6443":   "kas.example.svc:6443",
		"KAS.Example.svc.:6443":  "kas.example.svc.:6443",
		"[fd00::1]:6443":         "[fd00::1]:6443",
		"[FD00:0:0::1]:06443":    "[fd00::1]:6443",
		"10.0.0.1:443":           "10.0.0.1:443",
		"[::ffff:10.0.0.1]:443":  "10.0.0.1:443",
		"localhost:6443":         "localhost:6443",
		"[fe80::1%eth0]:6443":    "[fe80::1%eth0]:6443",
		"_kas._tcp.my_svc-1.a:1": "_kas._tcp.my_svc-1.a:1",
	} {
		d, err := ParseDestination(in)
		if err != nil {
			t.Errorf("%s: %v", in, err)
			continue
		}
		if d.String() != want {
			t.Errorf("%s became %s, want %s", in, d, want)
		}
	}
	for in, want := range map[string]string{
		"fd00::1:6443":                     "brackets, as [fd00::1]:6443",
		"fd00::1":                          "brackets",
		"kas.example":                      "missing port",
		"":                                 "missing port",
		":6443":                            "neither an IP address nor a DNS name",
		"kas:0":                            "from 1 to 65535",
		"kas:65536":                        "from 1 to 65535",
		"kas:https":                        "from 1 to 65535",
		"kas:+443":                         "from 1 to 65535",
		"[kas]:443":                        "only an IPv6 address",
		"a..b:443":                         "neither",
		"-a:443":                           "neither",
		"a b:443":                          "neither",
		"é:443":                            "neither",
		"a\n:443":                          `a\n:443`,
		strings.Repeat("x", 64) + ":443":   "neither",
		strings.Repeat("x.", 200) + ":443": "neither",
	} {
		if d, err := ParseDestination(in); err == nil {
			t.Errorf("%q became %v", in, d)
		} else if !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %q does not say %q", in, err, want)
		}
	}
}

func mustPolicy(t *testing.T, c PolicyConfig) *Policy {
	t.Helper()
	p, err := NewPolicy(c)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestPolicyDeniesWhatItDoesNotName(t *testing.T) {
	p := mustPolicy(t, PolicyConfig{
		Upstreams:           []string{"kas", "metrics"},
		AllowedDestinations: []string{"localhost:6443", "[fd00::1]:443"},
		Grants: []Grant{
			{Identity: "node1", Targets: []string{"kas"}},
			{Identity: "spiffe://prod/agent/*", Targets: []string{"metrics"}},
			{Identity: "edge-*", Targets: []string{"*"}},
			{Identity: "group:admins", Targets: []string{"etcd.example:2379"}},
		},
	})
	node1 := Identity{Name: "node1"}
	spiffe := Identity{Name: "node1", TrustDomain: "prod"}
	for _, test := range []struct {
		id     Identity
		target string
		want   string
		reason Reason
	}{
		{node1, "kas", "kas", ""},
		{node1, "metrics", "", ReasonForbidden},
		{node1, "localhost:6443", "localhost:6443", ""},
		{node1, "LOCALHOST:6443", "localhost:6443", ""},
		{node1, "[fd00:0::1]:443", "[fd00::1]:443", ""},
		{node1, "localhost:6444", "", ReasonUnknown},
		{node1, "127.0.0.1:6443", "", ReasonUnknown},
		{node1, "etcd.example:2379", "", ReasonForbidden},
		{node1, "*", "", ReasonUnknown},
		{node1, "", "", ReasonUnknown},
		{node1, "KAS", "", ReasonUnknown},
		{spiffe, "metrics", "metrics", ""},
		{spiffe, "kas", "kas", ""}, // a plain name means the agent in any trust domain
		{Identity{Name: "node1", TrustDomain: "prod2"}, "metrics", "", ReasonForbidden},
		{Identity{Name: "spiffe://prod/agent/x"}, "metrics", "", ReasonForbidden}, // a common name is no SPIFFE ID
		{Identity{Name: "node11"}, "kas", "", ReasonForbidden},
		{Identity{Name: "edge-7"}, "kas", "kas", ""},
		{Identity{Name: "edge-7"}, "metrics", "metrics", ""},
		{Identity{Name: "edge-7"}, "etcd.example:2379", "", ReasonForbidden}, // granted to others is not "every"
		{Identity{Name: "x", Groups: []string{"admins"}}, "etcd.example:2379", "etcd.example:2379", ""},
		{Identity{Name: "group:admins"}, "etcd.example:2379", "", ReasonForbidden},
	} {
		got, reason := p.Decide(test.id, test.target)
		if got != test.want || reason != test.reason {
			t.Errorf("%v → %q: %q %q, want %q %q", test.id, test.target, got, reason, test.want, test.reason)
		}
	}
	want := []string{"[fd00::1]:443", "etcd.example:2379", "localhost:6443"}
	if diff := cmp.Diff(want, p.Destinations()); diff != "" {
		t.Errorf("Destinations: %s", diff)
	}
}

func TestTheNameKAS(t *testing.T) {
	anybody := Identity{Name: "anybody"}
	p := mustPolicy(t, PolicyConfig{AllowedDestinations: []string{"kas.example:6443", "b:1"}})
	if got, reason := p.Decide(anybody, "kas"); got != "kas.example:6443" || reason != "" || p.KAS() != got {
		t.Errorf("without an upstream kas, kas is %q %q (%q)", got, reason, p.KAS())
	}
	// An upstream of that name is meant instead, and is not open to everybody.
	p = mustPolicy(t, PolicyConfig{Upstreams: []string{"kas"}, AllowedDestinations: []string{"b:1"}})
	if got, reason := p.Decide(anybody, "kas"); got != "" || reason != ReasonForbidden {
		t.Errorf("with an upstream kas and no grant: %q %q", got, reason)
	}
	p = mustPolicy(t, PolicyConfig{})
	for _, target := range []string{"kas", "b:1", "127.0.0.1:6443"} {
		if got, reason := p.Decide(anybody, target); got != "" || reason != ReasonUnknown || !p.Empty() {
			t.Errorf("an empty policy lets %s be %q %q", target, got, reason)
		}
	}
}

func TestWrongPolicies(t *testing.T) {
	for _, test := range []struct {
		want string
		c    PolicyConfig
	}{
		{"brackets", PolicyConfig{AllowedDestinations: []string{"fd00::1:6443"}}},
		{"identity is empty", PolicyConfig{Grants: []Grant{{Targets: []string{"*"}}}}},
		{"at the end", PolicyConfig{Grants: []Grant{{Identity: "a*b", Targets: []string{"*"}}}}},
		{"no targets", PolicyConfig{Grants: []Grant{{Identity: "a"}}}},
		{"means nothing", PolicyConfig{Grants: []Grant{{Identity: "a", Targets: []string{"kas"}}}}},
		{"neither an upstream (main)", PolicyConfig{Upstreams: []string{"main"}, Grants: []Grant{{Identity: "a", Targets: []string{"mian"}}}}},
	} {
		if _, err := NewPolicy(test.c); err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%+v: %v, want %q", test.c, err, test.want)
		}
	}
}
