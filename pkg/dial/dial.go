// Package dial is the vocabulary every carried connection is described in: what
// was meant (Target), how to reach it (Func), what comes back (Conn) and why it
// may not (the sentinel errors).
//
// Kasway is a chain of dial functions. On the agent a taken connection is handed
// to guard(tunnel); on the server a stream is handed to guard(upstream(direct)).
package dial

import (
	"context"
	"net"
	"net/netip"
)

// Target says what one client meant. The name alone decides where the
// connection goes; everything else is for people, for the audit line and for
// guards, and may be missing (its zero value).
type Target struct {
	// ID identifies the carried connection in the logs of both sides.
	ID string
	// Name is the target's name: a configured one such as "kas", or
	// "host:port" for a target given by address.
	Name string
	// Client is who connected, as the accepting side saw it.
	Client netip.AddrPort
	// Original is the address the client dialled. It is never dialled by us:
	// the address ranges of node and control plane may overlap.
	Original netip.AddrPort
	// UID is the user id of a client in the host's namespaces; UIDKnown is
	// false where it could not be told, and rules about uids then deny.
	UID      uint32
	UIDKnown bool
	// Unit is the system's unit of a client in the host's namespaces, empty
	// where it is in none; UnitKnown is false where it could not be told, and
	// rules about units then deny.
	Unit      string
	UnitKnown bool
	// Pod says that the client is not in the host's network namespace: rules
	// about uids and units, which mean the host's, are then not about it. The
	// zero value is the strict one: where nobody can tell, such rules deny.
	Pod bool
	// Workload names the client for people: a unit, a container or a pod. As
	// Unit and Command it may hold any bytes but NUL, chosen by who knows whom.
	Workload string
	// PID is that of the client's process in the initial pid namespace, 0 if
	// not known, and Command what that process called itself: decoration.
	PID     uint32
	Command string
}

// Conn is one end of a carried TCP connection. Its methods may be called
// concurrently, as those of every net.Conn.
type Conn interface {
	net.Conn
	// CloseWrite ends this side's direction (FIN) and leaves the other open.
	CloseWrite() error
	// Abort ends both directions at once and lets the peer see a reset, never
	// a clean end. The cause is for the far side's log; nil means a plain
	// reset. Abort after Close, and a second Abort, do nothing.
	Abort(cause error)
}

// Func opens a connection to t. It returns an error that wraps one of this
// package's sentinels where the reason is known. ctx bounds the dialling
// alone: once Func has returned, ending ctx does not touch the connection.
type Func func(ctx context.Context, t Target) (Conn, error)
