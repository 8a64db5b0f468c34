package intercept

import "net/netip"

// Attribution is what the kernel knows about who made a connection. It is for
// people, for the audit line and for guards; it never decides where a
// connection goes, and the zero value of a field means that it is not known.
type Attribution struct {
	// Original is the address that the client dialled.
	Original netip.AddrPort
	// CgroupID is that of the client's cgroup of version 2, which is the inode
	// of its directory.
	CgroupID uint64
	// UID is the client's user in the initial user namespace, if UIDKnown.
	UID      uint32
	UIDKnown bool
	// PID and Command are those of the thread group that called connect, in the
	// initial pid namespace; any process can choose its own Command.
	PID     uint32
	Command string
}

// Attributor is implemented by modes that know who connected. Attribute may be
// called concurrently, once for each connection taken: it gives back what the
// kernel kept for it. known is false if that was lost.
type Attributor interface {
	Attribute(t Taken) (a Attribution, known bool)
}
