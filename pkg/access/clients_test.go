package access

import (
	"errors"
	"fmt"
	"net/netip"
	"testing"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"

	"github.com/kasway/kasway/pkg/dial"
)

func prefixes(t *testing.T, s ...string) []netip.Prefix {
	t.Helper()
	p, err := ParsePrefixes(s)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func TestGuardClients(t *testing.T) {
	rules := []ClientRule{
		{Allow: true, Prefixes: prefixes(t, "10.1.0.5", "fd00:1::/64")},
		{Prefixes: prefixes(t, "10.1.0.0/16"), Targets: []string{"kas"}},
		{Allow: true, UIDs: []uint32{0}, Targets: []string{"kas"}},
		{UIDs: []uint32{1000}},
		{Units: []string{"cron.service", "ssh.service"}, Targets: []string{"kas"}},
		{UIDs: []uint32{7}, Units: []string{"kubelet.service"}, Targets: []string{"metrics"}},
		{Targets: []string{"closed"}},
	}
	root := dial.Target{Name: "kas", Client: netip.MustParseAddrPort("127.0.0.1:1"), UIDKnown: true, UnitKnown: true}
	with := func(f func(*dial.Target)) dial.Target { t := root; f(&t); return t }
	pod := func(client, target string) dial.Target {
		return dial.Target{Name: target, Client: netip.MustParseAddrPort(client), Pod: true}
	}
	for _, test := range []struct {
		name   string
		target dial.Target
		want   Reason
	}{
		{"first rule allows what the second denies", pod("10.1.0.5:9", "kas"), ""},
		{"v6 prefix", pod("[fd00:1::9]:9", "kas"), ""},
		{"prefix denies", pod("10.1.0.6:9", "kas"), ReasonRule},
		{"v4-mapped is the v4 address", pod("[::ffff:10.1.0.6]:9", "kas"), ReasonRule},
		{"other target", pod("10.1.0.6:9", "metrics"), ""},
		{"no prefix matches", pod("10.2.0.6:9", "kas"), ""},
		{"uid rules are not about pods", func() dial.Target {
			p := pod("10.2.0.6:9", "kas")
			p.UID, p.UIDKnown = 1000, true
			return p
		}(), ""},
		{"unit rules are not about pods", func() dial.Target {
			p := pod("10.2.0.6:9", "kas")
			p.Unit, p.UnitKnown = "cron.service", true
			return p
		}(), ""},
		{"root allowed", root, ""},
		{"uid denied", with(func(t *dial.Target) { t.UID = 1000 }), ReasonRule},
		{"uid without a rule", with(func(t *dial.Target) { t.UID = 1001 }), ""},
		{"uid unknown", with(func(t *dial.Target) { t.UIDKnown = false }), ReasonUIDUnknown},
		{"unit denied", with(func(t *dial.Target) { t.UID, t.Unit = 1, "ssh.service" }), ReasonRule},
		{"unit without a rule", with(func(t *dial.Target) { t.UID, t.Unit = 1, "sshd.service" }), ""},
		{"in no unit", with(func(t *dial.Target) { t.UID = 1 }), ""},
		{"unit unknown", with(func(t *dial.Target) { t.UID, t.UnitKnown = 1, false }), ReasonUnitUnknown},
		{"unit unknown, of a pod", pod("10.2.0.6:9", "metrics"), ""},
		{"either uid", with(func(t *dial.Target) { t.Name, t.UID, t.UnitKnown = "metrics", 7, false }), ReasonRule},
		{"or unit", with(func(t *dial.Target) { t.Name, t.UID, t.Unit = "metrics", 1, "kubelet.service" }), ReasonRule},
		{"client unknown", with(func(t *dial.Target) { t.Client = netip.AddrPort{} }), ReasonClientUnknown},
		{"rule about everybody", pod("10.9.9.9:9", "closed"), ReasonRule},
	} {
		t.Run(test.name, func(t *testing.T) {
			log, hook := quiet()
			m := NewAgentMetrics(prometheus.NewRegistry())
			end := &dialled{}
			_, err := GuardClients(rules, log, m, end.dial)(t.Context(), test.target)
			if test.want == "" {
				if err != nil || len(end.names) != 1 || len(hook.Entries) != 0 {
					t.Fatalf("%v, dialled %v, audited %v", err, end.names, hook.Entries)
				}
				return
			}
			var d *Denial
			if !errors.Is(err, dial.ErrDenied) || !errors.As(err, &d) || d.Reason != test.want {
				t.Errorf("%v, want %s", err, test.want)
			}
			if len(end.names) != 0 {
				t.Errorf("dialled %v", end.names)
			}
			if len(hook.Entries) != 1 || hook.LastEntry().Data["reason"] != string(test.want) {
				t.Errorf("audited %v", hook.Entries)
			} else if uid, known := hook.LastEntry().Data["uid"]; known != test.target.UIDKnown || known && uid != test.target.UID {
				t.Errorf("audited uid %v, the client's is %d (known: %v)", uid, test.target.UID, test.target.UIDKnown)
			}
			if n := testutil.ToFloat64(m.refused.WithLabelValues(string(test.want))); n != 1 {
				t.Errorf("counted %v", n)
			}
		})
	}
}

func TestGuardClientsWithoutRulesAllows(t *testing.T) {
	log, _ := quiet()
	end := &dialled{}
	if _, err := GuardClients(nil, log, nil, end.dial)(t.Context(), dial.Target{Name: "kas"}); err != nil || len(end.names) != 1 {
		t.Errorf("%v %v", err, end.names)
	}
}

func TestParsePrefixes(t *testing.T) {
	got := fmt.Sprint(prefixes(t, "10.1.2.3", "10.1.2.3/8", "fd00::1", "fd00::1/64", "::ffff:1.2.3.4"))
	if want := "[10.1.2.3/32 10.0.0.0/8 fd00::1/128 fd00::/64 1.2.3.4/32]"; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	for _, s := range []string{"", "kas", "10.0.0.0/33", "fe80::1%eth0", "::ffff:1.2.3.4/120"} {
		if p, err := ParsePrefixes([]string{s}); err == nil {
			t.Errorf("%q became %v", s, p)
		}
	}
}
