package access

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// ClientRule is one rule of an agent about its own clients. It matches a
// client that is in any of the prefixes, has any of the uids or is in any of the
// units (none given: every client) towards any of the targets (none given: every
// target).
type ClientRule struct {
	Allow    bool
	Prefixes []netip.Prefix
	// UIDs are of the host's users, Units of its service manager, such as
	// "kubelet.service"; they never match a pod.
	UIDs    []uint32
	Units   []string
	Targets []string
}

// ParsePrefixes reads prefixes as people write them; a single address is a
// prefix of its full length.
func ParsePrefixes(texts []string) ([]netip.Prefix, error) {
	out := make([]netip.Prefix, 0, len(texts))
	for _, s := range texts {
		if !strings.Contains(s, "/") {
			a, err := netip.ParseAddr(s)
			if err != nil || a.Zone() != "" {
				return nil, fmt.Errorf("%q is neither an IP address nor a prefix", s)
			}
			a = a.Unmap()
			out = append(out, netip.PrefixFrom(a, a.BitLen()))
			continue
		}
		p, err := netip.ParsePrefix(s)
		if err != nil || p.Addr().Is4In6() {
			return nil, fmt.Errorf("%q is neither an IP address nor a prefix", s)
		}
		out = append(out, p.Masked())
	}
	return out, nil
}

// GuardClients is the agent's: the first rule that matches decides, and a
// client that none matches is allowed. Where a rule asks for what is not known
// about a client — its address, or the uid or unit of a host process — the answer
// is no, whatever the rule would have said. A refusal fails at once with a Denial
// and is audited and counted.
func GuardClients(rules []ClientRule, log logrus.FieldLogger, m *Metrics, next dial.Func) dial.Func {
	rules = slices.Clone(rules)
	audit := newAudit(log)
	return func(ctx context.Context, t dial.Target) (dial.Conn, error) {
		reason := decideClient(rules, t)
		if reason == "" {
			return next(ctx, t)
		}
		m.refuse(reason)
		audit.write(t.Client.Addr().String(), refusal{target: t, reason: reason})
		return nil, &Denial{reason, fmt.Sprintf(`client %s may not reach "%s"`, observe.Text(t.Client.String()), observe.Text(t.Name))}
	}
}

// decideClient returns why t is refused; empty: it is allowed.
func decideClient(rules []ClientRule, t dial.Target) Reason {
	for i := range rules {
		r := &rules[i]
		if len(r.Targets) > 0 && !slices.Contains(r.Targets, t.Name) {
			continue
		}
		matched, reason := r.match(t)
		switch {
		case reason != "":
			return reason
		case matched && r.Allow:
			return ""
		case matched:
			return ReasonRule
		}
	}
	return ""
}

func (r *ClientRule) match(t dial.Target) (bool, Reason) {
	if len(r.Prefixes)+len(r.UIDs)+len(r.Units) == 0 {
		return true, ""
	}
	if len(r.Prefixes) > 0 {
		if !t.Client.IsValid() {
			return false, ReasonClientUnknown
		}
		// A zone says which link, not which address.
		addr := t.Client.Addr().Unmap().WithZone("")
		if slices.ContainsFunc(r.Prefixes, func(p netip.Prefix) bool { return p.Contains(addr) }) {
			return true, ""
		}
	}
	if t.Pod {
		return false, ""
	}
	if t.UIDKnown && slices.Contains(r.UIDs, t.UID) || t.UnitKnown && slices.Contains(r.Units, t.Unit) {
		return true, ""
	}
	switch {
	case len(r.UIDs) > 0 && !t.UIDKnown:
		return false, ReasonUIDUnknown
	case len(r.Units) > 0 && !t.UnitKnown:
		return false, ReasonUnitUnknown
	}
	return false, ""
}
