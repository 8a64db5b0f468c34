// Package observe is what people and machines see of a process: its logger,
// its metrics and its operator port.
package observe

import "github.com/sirupsen/logrus"

// Names of log fields, the same on both sides.
const (
	FieldConn     = "conn"     // connection id
	FieldTarget   = "target"   // target's name
	FieldClient   = "client"   // who connected
	FieldOriginal = "original" // address the client dialled
	FieldWorkload = "workload" // unit, container or pod of the client
	FieldUID      = "uid"      // the client's user
	FieldPID      = "pid"      // the client's process, in the initial pid namespace
	FieldCommand  = "command"  // what that process calls itself
	FieldAgent    = "agent"    // an agent's proven identity
	FieldNode     = "node"     // what an agent calls its node; it proves nothing
	FieldFrom     = "from"     // address that a connection to us comes from
	FieldServer   = "server"   // a server's address
	FieldUpstream = "upstream" // a KAS's address
	FieldReason   = "reason"   // why something was refused or ended
	FieldMode     = "mode"     // interception mode
	FieldListener = "listener" // address of one of our listeners
)

// Who is what is known of a client; zero values are not known.
type Who struct {
	Workload, Command string
	PID, UID          uint32
	UIDKnown          bool
}

// Fields adds what is known to f, fit for a log line, and returns f.
func (w Who) Fields(f logrus.Fields) logrus.Fields {
	if w.Workload != "" {
		f[FieldWorkload] = Text(w.Workload)
	}
	if w.Command != "" {
		f[FieldCommand] = Text(w.Command)
	}
	if w.PID != 0 {
		f[FieldPID] = w.PID
	}
	if w.UIDKnown {
		f[FieldUID] = w.UID
	}
	return f
}
