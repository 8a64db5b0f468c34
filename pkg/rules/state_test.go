package rules

import (
	"math/big"
	"math/rand/v2"
	"net/netip"
	"testing"
)

func entry(prefix string, port uint16) Entry { return Entry{netip.MustParsePrefix(prefix), port} }

func TestMatch(t *testing.T) {
	s := State{Diverts: []Divert{
		{Name: "kas", Entries: []Entry{entry("10.96.0.1/32", 443), entry("fd00::1/128", 443)}},
		{Name: "refused", Refused: true, Entries: []Entry{entry("10.9.0.0/16", 6443), entry("fd00::/64", 443)}},
		{Name: "late", Entries: []Entry{entry("10.9.3.1/32", 6443), entry("10.9.3.1/32", 443)}},
		{Name: "none"},
	}}
	for dst, want := range map[string]string{
		"10.96.0.1:443":          "kas",
		"10.96.0.1:6443":         "",
		"10.96.0.2:443":          "",
		"[::ffff:10.96.0.1]:443": "kas",
		"[fd00::1]:443":          "kas", // the first that matches, not the longest
		"[fd00::2]:443":          "refused",
		"[fd00:0:0:1::2]:443":    "",
		"10.9.0.0:6443":          "refused",
		"10.9.255.255:6443":      "refused",
		"10.10.0.0:6443":         "",
		"10.9.3.1:6443":          "refused",
		"10.9.3.1:443":           "late",
		"[::10.96.0.1]:443":      "",
	} {
		name := ""
		if d, ok := s.Match(netip.MustParseAddrPort(dst)); ok {
			name = d.Name
		}
		if name != want {
			t.Errorf("Match(%s) = %q; want %q", dst, name, want)
		}
	}
	if _, ok := s.Match(netip.AddrPort{}); ok {
		t.Error("the zero address matches")
	}
}

// naive is Match by arithmetic on whole addresses.
func naive(s *State, dst netip.AddrPort) string {
	number := func(a netip.Addr) *big.Int { return new(big.Int).SetBytes(a.AsSlice()) }
	addr := dst.Addr()
	if addr.Is4In6() {
		b := addr.As16()
		addr = netip.AddrFrom4([4]byte(b[12:]))
	}
	for _, d := range s.Diverts {
		for _, e := range d.Entries {
			if e.Prefix.Addr().BitLen() != addr.BitLen() || e.Port != dst.Port() {
				continue
			}
			shift := uint(addr.BitLen() - e.Prefix.Bits())
			a, b := number(addr), number(e.Prefix.Addr())
			if a.Rsh(a, shift).Cmp(b.Rsh(b, shift)) == 0 {
				return d.Name
			}
		}
	}
	return ""
}

func TestMatchRandomly(t *testing.T) {
	seed := rand.Uint64()
	rnd := rand.New(rand.NewPCG(seed, 0))
	// Few distinct bits, so that addresses and prefixes meet.
	address := func() netip.Addr {
		b := [16]byte{0xfd, 15: byte(rnd.IntN(4)), 14: byte(rnd.IntN(3)), 7: byte(rnd.IntN(2))}
		switch rnd.IntN(3) {
		case 0:
			return netip.AddrFrom4([4]byte{10, 0, b[14], b[15]})
		case 1:
			return netip.AddrFrom16([16]byte{10: 0xff, 11: 0xff, 12: 10, 14: b[14], 15: b[15]})
		}
		return netip.AddrFrom16(b)
	}
	matched, missed := 0, 0
	for range 2000 {
		var s State
		for i := range rnd.IntN(4) {
			d := Divert{Name: string(rune('a' + i))}
			for range rnd.IntN(4) {
				a := address().Unmap()
				p := netip.PrefixFrom(a, a.BitLen()-rnd.IntN(a.BitLen()/3)).Masked()
				d.Entries = append(d.Entries, Entry{p, uint16(443 + rnd.IntN(2))})
			}
			s.Diverts = append(s.Diverts, d)
		}
		for range 20 {
			dst, got := netip.AddrPortFrom(address(), uint16(443+rnd.IntN(2))), ""
			if d, ok := s.Match(dst); ok {
				got = d.Name
			}
			want := naive(&s, dst)
			if got != want {
				t.Fatalf("seed %d: Match(%s) = %q; want %q of %+v", seed, dst, got, want, s.Diverts)
			}
			if got == "" {
				missed++
			} else {
				matched++
			}
		}
	}
	if matched < 1000 || missed < 1000 {
		t.Errorf("%d matched, %d did not: the test says too little", matched, missed)
	}
}
