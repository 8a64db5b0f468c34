package access

import (
	"context"
	"errors"
	"fmt"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// Guard is the server's: it lets next dial what the policy allows to the
// identity in ctx, under the name that the policy made of the target's. All
// else fails at once with a Denial and is audited and counted, as is a Denial
// by a guard behind next.
func Guard(p *Policy, log logrus.FieldLogger, m *Metrics, next dial.Func) dial.Func {
	audit := newAudit(log)
	return func(ctx context.Context, t dial.Target) (dial.Conn, error) {
		id, ok := From(ctx)
		refuse := func(reason Reason, detail string) {
			m.refuse(reason)
			audit.write(id.String(), refusal{agent: id.String(), target: t, reason: reason, detail: detail})
		}
		if !ok {
			refuse(ReasonUnidentified, "")
			return nil, &Denial{ReasonUnidentified, "the agent is not identified"}
		}
		name, reason := p.Decide(id, t.Name)
		if reason != "" {
			refuse(reason, "")
			// One text for both reasons: an agent does not learn what exists.
			return nil, &Denial{reason, fmt.Sprintf(`target "%s" is not allowed to agent "%s"`, observe.Text(t.Name), observe.Text(id.String()))}
		}
		to := t
		to.Name = name
		c, err := next(ctx, to)
		var denial *Denial
		if errors.As(err, &denial) {
			refuse(denial.Reason, denial.Detail)
		}
		return c, err
	}
}
