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
