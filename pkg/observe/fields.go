// Package observe is what people and machines see of a process: its logger,
// its metrics and its operator port.
package observe

// Names of log fields, the same on both sides.
const (
	FieldConn     = "conn"     // connection id
	FieldTarget   = "target"   // target's name
	FieldClient   = "client"   // who connected
	FieldOriginal = "original" // address the client dialled
	FieldWorkload = "workload" // unit, container or pod of the client
	FieldAgent    = "agent"    // an agent's proven identity
	FieldNode     = "node"     // what an agent calls its node; it proves nothing
	FieldFrom     = "from"     // address that a connection to us comes from
	FieldServer   = "server"   // a server's address
	FieldUpstream = "upstream" // a KAS's address
	FieldReason   = "reason"   // why something was refused or ended
	FieldMode     = "mode"     // interception mode
	FieldListener = "listener" // address of one of our listeners
)
