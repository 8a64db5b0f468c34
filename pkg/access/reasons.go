package access

import "github.com/kasway/kasway/pkg/dial"

// Reason says why a guard refused. The set is closed: it labels a metric.
type Reason string

// Why the server's guard refuses.
const (
	ReasonUnidentified Reason = "unidentified"   // nobody proved who asks
	ReasonUnknown      Reason = "unknown-target" // no such upstream or destination
	ReasonForbidden    Reason = "forbidden"      // not allowed to this agent
	ReasonAddress      Reason = "address"        // the name resolves to an address it may not mean
)

// Why the agent's guard refuses.
const (
	ReasonRule          Reason = "rule"           // a rule denies
	ReasonUIDUnknown    Reason = "uid-unknown"    // a rule asks for a uid that nobody can tell
	ReasonUnitUnknown   Reason = "unit-unknown"   // a rule asks for a unit that nobody can tell
	ReasonClientUnknown Reason = "client-unknown" // a rule asks for an address that nobody can tell
)

// Denial is the error of every refusal. It wraps dial.ErrDenied. Its text goes
// to whoever asked and tells no more than that.
type Denial struct {
	Reason Reason
	Detail string
}

// Error implements error.
func (d *Denial) Error() string { return dial.ErrDenied.Error() + ": " + d.Detail }

// Unwrap makes a Denial a dial.ErrDenied.
func (d *Denial) Unwrap() error { return dial.ErrDenied }
