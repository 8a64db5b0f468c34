package intercepttest

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/tests/netns"
)

// eternity is how long a connect is tried that nobody must answer.
const eternity = 500 * time.Millisecond

// RunPolicy shows what network policies on pods mean for the mode, with every
// kube-proxy. With the mode off they are seen to work: one that denies the KAS
// stops every pod, one that allows only the KAS none, and the KAS sees the pod's
// own address. With the mode on a diverted pod talks to its own node: a policy
// that denies the KAS does not see it, so that it connects unless the agent's
// guard refuses it; one that allows only the KAS stops it. Where a mode keeps
// the destination (see Factory) policies that name it are enforced as ever.
func RunPolicy(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	columns := map[netns.KubeProxy]*[]entry{}
	t.Run("kube-proxies", func(t *testing.T) {
		for _, proxy := range netns.KubeProxies {
			n := f.node(proxy)
			if f.refuses(n) != "" {
				continue // as the matrix proves
			}
			column := &[]entry{}
			columns[proxy] = column
			t.Run(string(proxy), func(t *testing.T) {
				t.Parallel()
				report(t, build(t, n).policies(t, f, column))
			})
		}
	})
	table := &Table{Mode: f.Name + ", network policy"}
	for _, proxy := range netns.KubeProxies {
		if columns[proxy] != nil {
			for _, e := range *columns[proxy] {
				table.set(e.row, proxy, e.word, e.err)
			}
		}
	}
	table.show(t)
}

// entry is one entry of a table's column.
type entry struct {
	row, word string
	err       error
}

// policed is a client with a policy and what must become of it.
type policed struct {
	cell
	policy netns.Policy
	word   string
	meets  func(cell) error
}

// policies runs one column.
func (w *world) policies(t *testing.T, f Factory, column *[]entry) error {
	var errs []error
	run := func(when string, all []policed) {
		results := make([]error, len(all))
		each(len(all), func(i int) { results[i] = all[i].meets(all[i].cell) })
		for i, p := range all {
			row := fmt.Sprintf("%s %s, %s", p.cell, p.policy, when)
			*column = append(*column, entry{row, p.word, results[i]})
			if results[i] != nil {
				errs = append(errs, fmt.Errorf("%s (%s): %w", row, p.to.addr, results[i]))
			}
		}
	}
	for _, policy := range policies {
		if err := w.setPolicy(policy); err != nil {
			return err
		}
		run("mode off", unpoliced(w.cells("kas"), policy))
	}
	h := start(t, w, f)
	if _, err := h.Apply(firstState(f)); err != nil {
		return errors.Join(append(errs, err)...)
	}
	for _, policy := range policies {
		if err := w.setPolicy(policy); err != nil {
			return errors.Join(append(errs, err)...)
		}
		run("mode on", w.expected(f, policy, "connects", diverted))
	}
	if err := errors.Join(w.setPolicy(netns.DenyKAS), h.Guard(access.ClientRule{Prefixes: w.podPrefixes()})); err != nil {
		return errors.Join(append(errs, err)...)
	}
	run("so does our guard", w.expected(f, netns.DenyKAS, "reset", resets))
	for _, c := range w.taken(f, "kas") {
		if err := diverted(c); !c.pod && err != nil {
			errs = append(errs, fmt.Errorf("neither policy nor guard is for the host: %s: %w", c, err))
		}
	}
	return errors.Join(append(errs, h.Close(), h.Cleanup(), h.End())...)
}

// policies are those that are tried, besides none, which the matrix tries.
var policies = []netns.Policy{netns.DenyKAS, netns.OnlyKAS}

// unpoliced are the pods among cells as a policy meets them without us.
func unpoliced(cells []cell, policy netns.Policy) (all []policed) {
	for _, c := range cells {
		switch {
		case !c.pod:
		case policy == netns.DenyKAS:
			all = append(all, policed{c, policy, "times out", timesOut})
		default:
			all = append(all, policed{c, policy, "connects", reachesKAS})
		}
	}
	return all
}

// expected is what becomes of pods while the mode is on; those that the policy
// does not stop meet taken.
func (w *world) expected(f Factory, policy netns.Policy, word string, taken func(cell) error) (all []policed) {
	for _, c := range w.taken(f, "kas") {
		// Whether the policy names the address that the node's filters see.
		named := f.KeepsDestination && slices.Contains(w.named(), c.to.addr)
		switch {
		case !c.pod:
		case (policy == netns.DenyKAS) == named:
			all = append(all, policed{c, policy, "times out", timesOut})
		default:
			all = append(all, policed{c, policy, word, taken})
		}
	}
	return all
}

// each runs f(0) ... f(n-1) at the same time.
func each(n int, f func(i int)) {
	done := make(chan struct{}, n)
	for i := range n {
		go func() { f(i); done <- struct{}{} }()
	}
	for range n {
		<-done
	}
}

// named are the addresses that policies name: where the KAS really is.
func (w *world) named() (all []netip.AddrPort) {
	for _, c := range w.cells("kas") {
		if !slices.Contains(all, c.to.endpoint) {
			all = append(all, c.to.endpoint)
		}
	}
	return all
}

func (w *world) setPolicy(p netns.Policy) error {
	return w.Node.SetPolicy(w.node.KubeProxy, p, w.named(), append(slices.Clone(w.RoutedPods), w.BridgedPods...)...)
}

func (w *world) podPrefixes() []netip.Prefix {
	return []netip.Prefix{w.Plan.Routed4, w.Plan.Routed6, w.Plan.Bridge4, w.Plan.Bridge6}
}

// timesOut demands that nobody answers.
func timesOut(c cell) error {
	flow, err := Connect(c.client, c.to.addr, false, eternity)
	if err == nil {
		flow.End()
		return errors.New("connected, want a time-out")
	}
	if n, ok := errors.AsType[net.Error](err); !ok || !n.Timeout() {
		return fmt.Errorf("want a time-out: %w", err)
	}
	return nil
}

// resets demands that the connection is cut before any answer.
func resets(c cell) error {
	flow, err := Connect(c.client, c.to.addr, false, patience)
	if err == nil {
		_, err = flow.Ask(patience)
		flow.End()
	}
	if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
		return fmt.Errorf("want a reset: %w", err)
	}
	return nil
}
