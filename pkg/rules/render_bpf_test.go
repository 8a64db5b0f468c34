package rules

import (
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func TestRenderBPF(t *testing.T) {
	entry := func(p string, port uint16) Entry { return Entry{netip.MustParsePrefix(p), port} }
	s := State{Diverts: []Divert{
		{Name: "wide", Entries: []Entry{entry("10.0.0.0/8", 443), entry("fd00::/16", 443)}},
		{Name: "narrow", Entries: []Entry{entry("10.96.0.1/32", 443), entry("10.96.0.1/32", 6443), entry("fd00:96::1/128", 443)}},
		{Name: "late", Entries: []Entry{entry("10.96.0.0/16", 6443), entry("10.0.0.0/8", 443)}},
	}}
	want := []BPFEntry{
		{netip.MustParsePrefix("10.0.0.0/8"), 443, 0},
		{netip.MustParsePrefix("10.96.0.0/16"), 6443, 2},
		{netip.MustParsePrefix("10.96.0.1/32"), 443, 0}, // the wide one comes first
		{netip.MustParsePrefix("10.96.0.1/32"), 6443, 1},
		{netip.MustParsePrefix("fd00::/16"), 443, 0},
		{netip.MustParsePrefix("fd00:96::1/128"), 443, 0},
	}
	compare := cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	if diff := cmp.Diff(want, RenderBPF(s), compare); diff != "" {
		t.Error(diff)
	}
}

func TestRenderBPFText(t *testing.T) {
	s := State{
		Clients: Clients{Host: true, Pods: true}, WhenDown: Refuse, Mark: 0x40, MarkMask: 0x40,
		Node4: netip.MustParseAddr("169.254.77.1"), Node6: netip.MustParseAddr("fd77::1"),
		Diverts: []Divert{
			{Name: "kas", Entries: []Entry{{netip.MustParsePrefix("10.96.0.1/32"), 443}, {netip.MustParsePrefix("fd00:30::/64"), 6443}},
				Ports: Ports{Host4: 1, Host6: 2, Pod4: 3, Pod6: 4}},
			{Name: "other", Entries: []Entry{{netip.MustParsePrefix("10.96.0.2/32"), 443}}, Ports: Ports{Host4: 5}, Refused: true},
		},
	}
	want := `# Programs on the hooks connect4 and connect6 send connects of the host and of pods to these
# addresses to the listeners beside them, before any address translation; getpeername4
# and getpeername6 show the address that was dialled, sockops tells who connected.
# Sockets with mark 0x40/0x40 pass. If the agent dies, connects are refused.
ADDRESS       PORT  TARGET  HOST         PODS
10.96.0.1     443   kas     127.0.0.1:1  169.254.77.1:3
10.96.0.2     443   other   refused      -
fd00:30::/64  6443  kas     [::1]:2      [fd77::1]:4
`
	if diff := cmp.Diff(want, RenderBPFText(s)); diff != "" {
		t.Error(diff)
	}
}
