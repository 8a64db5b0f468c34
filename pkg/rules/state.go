package rules

import "net/netip"

// Entry is one thing that is diverted: TCP to Port on any address of Prefix
// (a single address is a /32 or /128). Always masked; IPv4 is never v4-mapped.
type Entry struct {
	Prefix netip.Prefix `json:"prefix"`
	Port   uint16       `json:"port"`
}

// WhenDown is what clients meet while no agent is alive.
type WhenDown string

// The two answers of a node whose agent is dead or frozen.
const (
	Refuse WhenDown = "refuse" // connects are answered ECONNREFUSED
	Direct WhenDown = "direct" // connects pass untouched
)

// Clients says whose connections are diverted.
type Clients struct {
	Host bool `json:"host"`
	Pods bool `json:"pods"`
}

// Ports are the local ports of one target's listeners; 0 where there is none.
// Host listeners are on 127.0.0.1 and ::1, pod listeners on the node-local
// addresses of State.
type Ports struct {
	Host4 uint16 `json:"host4"`
	Host6 uint16 `json:"host6"`
	Pod4  uint16 `json:"pod4"`
	Pod6  uint16 `json:"pod6"`
}

// Divert is one target's part of State.
type Divert struct {
	// Name is the target's name.
	Name    string  `json:"name"`
	Entries []Entry `json:"entries"`
	Ports   Ports   `json:"ports"`
	// Refused: connects are answered ECONNREFUSED instead of being diverted.
	Refused bool `json:"refused"`
}

// State is everything a mode installs, whole: applying a State replaces the
// one before. It is plain data and safe to share once built.
type State struct {
	// Generation tells the kernel objects of this agent process from those of
	// another (1–15 of [a-z0-9]).
	Generation string   `json:"generation"`
	Clients    Clients  `json:"clients"`
	WhenDown   WhenDown `json:"whenDown"`
	// Mark and MarkMask exempt our own sockets.
	Mark     uint32 `json:"mark"`
	MarkMask uint32 `json:"markMask"`
	// Node4 and Node6 are the node-local addresses pods are diverted to.
	Node4 netip.Addr `json:"node4"`
	Node6 netip.Addr `json:"node6"`
	// Diverts in the order of the configuration: the first that matches wins.
	Diverts []Divert `json:"diverts"`
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
