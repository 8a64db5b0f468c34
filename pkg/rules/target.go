package rules

import (
	"net/netip"
	"strconv"
)

// Target is a named thing that clients mean, as configured: a group of
// equivalent addresses.
type Target struct {
	// Name is what travels to the server.
	Name string
	// Addresses as written: "10.96.0.1:443", "[fd00::1]:443",
	// "10.9.0.0/16:6443", "[fd00::/64]:6443" or "kas.example:6443".
	Addresses []Address
	// Exact keeps the addresses apart: Expand makes one target of each. No
	// target that Expand returns has it set.
	Exact bool
	// Listen is the local port of mode listen; 0: none.
	Listen uint16
}

// SelfTestName is the target through which an agent proves that its mode
// works; no configured target may take it.
const SelfTestName = "kasway-selftest"

// Bounds that keep what a mode installs small. Kernel sets and listeners are
// sized by them.
const (
	MaxTargets   = 64
	MaxAddresses = 256 // of all targets together
)

// Address is one destination of a Target: either Prefix (valid) or Host, a DNS
// name that is resolved again by interval. Addresses are comparable: equal ones
// mean the same.
type Address struct {
	Prefix netip.Prefix
	Host   string
	Port   uint16
}

// Single reports whether the address is one that can be dialled: a host or one
// IP address, not a whole prefix.
func (a Address) Single() bool { return a.Host != "" || a.Prefix.IsSingleIP() }

// String returns the one canonical spelling of a, which ParseAddress reads back
// to an equal Address. It is also the name of a target given by address.
func (a Address) String() string {
	port := ":" + strconv.Itoa(int(a.Port))
	if a.Host != "" {
		return a.Host + port
	}
	text := a.Prefix.String()
	if a.Prefix.IsSingleIP() {
		text = a.Prefix.Addr().String()
	}
	if a.Prefix.Addr().Is6() {
		text = "[" + text + "]"
	}
	return text + port
}

// Expand returns the targets that are diverted: those with Exact become one
// target per address, named by the address, all others stay as they are. The
// server dials such a name only where its policy allows it.
func Expand(targets []Target) []Target {
	var out []Target
	for _, t := range targets {
		if !t.Exact {
			out = append(out, t)
			continue
		}
		for _, a := range t.Addresses {
			out = append(out, Target{Name: a.String(), Addresses: []Address{a}, Listen: t.Listen})
		}
	}
	return out
}
