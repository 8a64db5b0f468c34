package access

import (
	"net/netip"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/time/rate"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// A refusal costs its causer next to nothing, so what it costs us is bounded.
// Every refusal has its own line up to auditRate a second (auditBurst at once).
// Beyond that they are folded, per asker and reason, into one line each
// auditFold, which has the last one's fields and how many it stands for. None is
// dropped: with a line without a count standing for one, the counts add up to
// the refusals. Askers beyond auditAskers in one auditFold share a line.
const (
	auditRate   = 50
	auditBurst  = 200
	auditFold   = time.Second
	auditAskers = 256
)

// FieldCount says how many refusals an audit line stands for.
const FieldCount = "count"

// auditMessage is what people and their tools look for.
const auditMessage = "refused by policy"

// refusal is what is known about one.
type refusal struct {
	agent  string // empty on the agent itself
	target dial.Target
	reason Reason
	detail string
}

// fields returns the audit line's fields. All of them but the reason may have
// been written by somebody else.
func (r *refusal) fields() logrus.Fields {
	t := &r.target
	f := observe.Who{Workload: t.Workload, Command: t.Command, PID: t.PID, UID: t.UID, UIDKnown: t.UIDKnown}.Fields(logrus.Fields{
		observe.FieldReason: string(r.reason),
		observe.FieldTarget: observe.Text(t.Name),
	})
	add := func(name, value string) {
		if value != "" {
			f[name] = observe.Text(value)
		}
	}
	add(observe.FieldAgent, r.agent)
	add(observe.FieldConn, t.ID)
	add(observe.FieldClient, addrText(t.Client))
	add(observe.FieldOriginal, addrText(t.Original))
	add("detail", r.detail)
	return f
}

// addrText is empty for an address that is not known. (An IPv6 zone may be any
// text: what this returns is not safe to log as it is.)
func addrText(a netip.AddrPort) string {
	if !a.IsValid() {
		return ""
	}
	return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()).String()
}

// audit writes refusals. Safe for concurrent use.
type audit struct {
	log   logrus.FieldLogger
	limit *rate.Limiter

	mu     sync.Mutex
	folded map[askerKey]*fold
}

type askerKey struct {
	asker  string
	reason Reason
}

type fold struct {
	count int
	last  refusal
}

func newAudit(log logrus.FieldLogger) *audit {
	return &audit{log: log, limit: rate.NewLimiter(auditRate, auditBurst), folded: map[askerKey]*fold{}}
}

func (a *audit) write(asker string, r refusal) {
	if a.limit.Allow() {
		a.log.WithFields(r.fields()).Warn(auditMessage)
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.folded) == 0 {
		time.AfterFunc(auditFold, a.flush)
	}
	key := askerKey{asker, r.reason}
	if a.folded[key] == nil && len(a.folded) >= auditAskers {
		key.asker = "(others)"
	}
	f := a.folded[key]
	if f == nil {
		f = &fold{}
		a.folded[key] = f
	}
	f.count++
	f.last = r
}

// flush writes what was folded.
func (a *audit) flush() {
	a.mu.Lock()
	folded := a.folded
	a.folded = map[askerKey]*fold{}
	a.mu.Unlock()
	for _, f := range folded {
		a.log.WithFields(f.last.fields()).WithField(FieldCount, f.count).Warn(auditMessage)
	}
}
