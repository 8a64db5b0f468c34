package rules

import "net/netip"

// Target is a named thing that clients mean, as configured: a group of
// equivalent addresses.
type Target struct {
	// Name is what travels to the server.
	Name string
	// Addresses as written: "10.96.0.1:443", "[fd00::1]:443",
	// "10.9.0.0/16:6443", "[fd00::/64]:6443" or "kas.example:6443".
	Addresses []Address
	// Listen is the local port of mode listen; 0: none.
	Listen uint16
}

// Address is one destination of a Target: either Prefix (valid) or Host, a DNS
// name that is resolved again by interval.
type Address struct {
	Prefix netip.Prefix
	Host   string
	Port   uint16
}
