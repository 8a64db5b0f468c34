package rules

import "net/netip"

// Entry is one thing that is diverted: TCP to Port on any address of Prefix
// (a single address is a /32 or /128). Always masked; IPv4 is never v4-mapped.
type Entry struct {
	Prefix netip.Prefix
	Port   uint16
}

// WhenDown is what clients meet while no agent is alive.
type WhenDown string

// The two answers of a node whose agent is dead or frozen.
const (
	Refuse WhenDown = "refuse" // connects are answered ECONNREFUSED
	Direct WhenDown = "direct" // connects pass untouched
)

// Clients says whose connections are diverted.
type Clients struct{ Host, Pods bool }

// Ports are the local ports of one target's listeners; 0 where there is none.
// Host listeners are on 127.0.0.1 and ::1, pod listeners on the node-local
// addresses of State.
type Ports struct{ Host4, Host6, Pod4, Pod6 uint16 }

// Divert is one target's part of State.
type Divert struct {
	// Name is the target's name.
	Name    string
	Entries []Entry
	Ports   Ports
	// Refused: connects are answered ECONNREFUSED instead of being diverted.
	Refused bool
}

// State is everything a mode installs, whole: applying a State replaces the
// one before. It is plain data and safe to share once built.
type State struct {
	// Generation tells the kernel objects of this agent process from those of
	// another (1–15 of [a-z0-9]).
	Generation string
	Clients    Clients
	WhenDown   WhenDown
	// Mark and MarkMask exempt our own sockets.
	Mark, MarkMask uint32
	// Node4 and Node6 are the node-local addresses pods are diverted to.
	Node4, Node6 netip.Addr
	// Diverts in the order of the configuration: the first that matches wins.
	Diverts []Divert
}

// Match is the reference for every mode: which target a connect to dst means.
// A v4-mapped dst is the IPv4 address it holds.
func (s *State) Match(dst netip.AddrPort) (*Divert, bool) {
	addr := dst.Addr().Unmap()
	for i := range s.Diverts {
		for _, e := range s.Diverts[i].Entries {
			if e.Port == dst.Port() && e.Prefix.Contains(addr) {
				return &s.Diverts[i], true
			}
		}
	}
	return nil, false
}
