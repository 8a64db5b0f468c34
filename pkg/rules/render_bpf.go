package rules

import (
	"cmp"
	"net/netip"
	"slices"
)

// BPFEntry is one entry of the map of mode ebpf, whose lookup finds the longest
// prefix: TCP to Port on any address of Prefix means the Divert of this index.
type BPFEntry struct {
	Prefix netip.Prefix
	Port   uint16
	// Divert is an index of State.Diverts: the first one in the order of the
	// configuration that has the whole of Prefix.
	Divert int
}

// RenderBPF makes the entries of a State, in a stable order, each prefix and port
// once. The longest prefix wins in the kernel, and the first Divert in State.Match:
// a prefix that lies within another one of an earlier Divert gets that one's index.
func RenderBPF(s State) []BPFEntry {
	var out []BPFEntry
	seen := map[Entry]bool{}
	for i := range s.Diverts {
		for _, e := range s.Diverts[i].Entries {
			if seen[e] {
				continue // an earlier one's
			}
			seen[e] = true
			out = append(out, BPFEntry{e.Prefix, e.Port, firstWith(s, i, e)})
		}
	}
	slices.SortFunc(out, func(a, b BPFEntry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()), cmp.Compare(a.Port, b.Port))
	})
	return out
}

// firstWith is the first Divert up to the i-th that has all of e.
func firstWith(s State, i int, e Entry) int {
	for j := range i {
		for _, f := range s.Diverts[j].Entries {
			if f.Port == e.Port && f.Prefix.Bits() <= e.Prefix.Bits() && f.Prefix.Contains(e.Prefix.Addr()) {
				return j
			}
		}
	}
	return i
}
