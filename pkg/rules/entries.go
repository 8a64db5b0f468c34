package rules

import (
	"cmp"
	"net/netip"
	"slices"
)

// compact sorts entries, by address and then port, and drops those that another
// one covers: kernel sets of intervals accept no overlap.
func compact(entries []Entry) []Entry {
	slices.SortFunc(entries, func(a, b Entry) int {
		return cmp.Or(a.Prefix.Addr().Compare(b.Prefix.Addr()), cmp.Compare(a.Prefix.Bits(), b.Prefix.Bits()), cmp.Compare(a.Port, b.Port))
	})
	entries = slices.Compact(entries)
	var wide []Entry // the few that cover more than one address
	for _, e := range entries {
		if !e.Prefix.IsSingleIP() {
			wide = append(wide, e)
		}
	}
	return slices.DeleteFunc(entries, func(e Entry) bool {
		return slices.ContainsFunc(wide, func(w Entry) bool {
			return w != e && w.Port == e.Port && w.Prefix.Bits() <= e.Prefix.Bits() && w.Prefix.Contains(e.Prefix.Addr())
		})
	})
}

// usable sorts the addresses of one family that a DNS answer holds, without
// those that are no host's or this host's own, whatever a DNS server says: only
// an address that is written in the configuration may be one of them. It bounds
// them; cut tells that some were left out by that.
func usable(answer []netip.Addr) (addrs []netip.Addr, cut bool) {
	for _, a := range answer {
		a = a.Unmap().WithZone("")
		if a.IsGlobalUnicast() {
			addrs = append(addrs, a)
		}
	}
	// Sorted, because DNS servers rotate their answers.
	slices.SortFunc(addrs, netip.Addr.Compare)
	addrs = slices.Compact(addrs)
	if len(addrs) > maxPerFamily {
		return addrs[:maxPerFamily:maxPerFamily], true
	}
	return addrs, false
}
