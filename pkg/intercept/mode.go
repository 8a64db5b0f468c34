// Package intercept is HOW connections reach us: it opens a listener per
// target, lets a Mode make the kernel send connections there, and forwards
// what it accepts. The accepted port is the target; nothing else decides.
package intercept

import (
	"context"
	"errors"
	"fmt"

	"github.com/kasway/kasway/pkg/rules"
)

// Mode is one way to divert. Implementations are idempotent, and work after a
// crash of the former owner. A Mode is used by one goroutine at a time.
type Mode interface {
	// Preflight finds out whether Apply can work here, and changes nothing.
	Preflight(ctx context.Context) Report
	// Apply installs the whole wanted state, replacing what this Mode
	// installed before without a gap. From the first Apply on until Close the
	// Mode keeps its heartbeat: if the process dies or freezes, connects are
	// refused or pass within 3 s, as State.WhenDown says.
	Apply(ctx context.Context, s rules.State) error
	// Verify tells what is not as the last Apply left it; nil: all is well. An
	// error means that it could not be found out. It changes nothing: another
	// Apply of the same State is the repair.
	Verify(ctx context.Context) ([]Damage, error)
	// Close stops diverting and the heartbeat. Connections already taken live
	// on, and the dead-agent guard stays in force where WhenDown is Refuse.
	Close() error
}

// Damage is one thing that is not as Apply left it: somebody else has removed,
// changed or overridden it.
type Damage struct {
	// What is missing or changed, such as "rule 91 (fwmark ... lookup 27511)".
	What string
	// Suspects are programs known to do that, for the log; may be empty.
	Suspects string
}

// ErrNotSupported marks a Report of a node that cannot do this; any other
// error means that it could not be found out.
var ErrNotSupported = errors.New("not supported")

// ErrPrivilege marks a Report of a process that may not; the exit code is 77.
var ErrPrivilege = errors.New("missing privilege")

// Report is the answer of a preflight: Err nil (it can work), wrapping
// ErrNotSupported or ErrPrivilege, or anything else (inconclusive).
type Report struct {
	Err error
	// Remedy is what an operator can do about Err, one sentence.
	Remedy string
	// Notes are facts worth knowing though the mode can work.
	Notes []string
}

// NotSupported makes the Report of a node that cannot do this.
func NotSupported(remedy, format string, a ...any) Report {
	return Report{Err: fmt.Errorf("%w: %s", ErrNotSupported, fmt.Sprintf(format, a...)), Remedy: remedy}
}
