package main

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// How much of everything one round takes; together about half a second for each
// side of a pair.
const (
	refusals  = 2000
	connects  = 500
	roundsRTT = 1000
	streamFor = 150 * time.Millisecond
)

// nobody is an address at which nobody listens and that no mode diverts.
var nobody = netip.MustParseAddrPort("127.0.0.1:1")

// kas is what is diverted.
var kas = netip.AddrPortFrom(netns.KAS4, 6443)

// measureNames are in the order of the table.
var measureNames = []string{"unmatched connect", "connect + echo", "round trip", "throughput", "refused connect"}

// bench is one mode's laboratory.
type bench struct {
	topo      *netns.Topology
	holder    *worker
	host, pod *worker
	state     rules.State
	ports     rules.Ports
}

// measure measures every mode in a laboratory of its own, so that what one
// leaves cannot weigh on the next.
func measure(o options) (*report, error) {
	r := newReport(o)
	for _, mode := range o.modes {
		fmt.Fprintf(os.Stderr, "%s: %d rounds\n", mode, o.rounds)
		results, err := measureMode(mode, o.rounds)
		if err != nil {
			return nil, fmt.Errorf("mode %s: %w", mode, err)
		}
		r.add(mode, results)
	}
	r.LoadAfter = load()
	return r, nil
}

func measureMode(mode string, rounds int) (results map[string]*pairs, err error) {
	b, err := build(mode)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, b.topo.Close()) }()
	results = map[string]*pairs{}
	for i := range rounds {
		// The order alternates, so that a machine that gets slower or faster
		// favours neither.
		first, second := opOff, opOn
		if i%2 == 1 {
			first, second = second, first
		}
		for _, op := range []string{first, second} {
			if err := b.one(op, results); err != nil {
				return nil, fmt.Errorf("round %d, %s: %w", i+1, op, err)
			}
		}
	}
	return results, b.end()
}

func build(mode string) (*bench, error) {
	topo, err := netns.Build(netns.Spec{RoutedPods: 1})
	if err != nil {
		return nil, err
	}
	b := &bench{topo: topo, state: intercepttest.State(rules.Direct)}
	b.state.Diverts = []rules.Divert{{
		Name: "kas", Entries: []rules.Entry{{Prefix: netip.PrefixFrom(kas.Addr(), kas.Addr().BitLen()), Port: kas.Port()}},
	}}
	if err := b.start(mode); err != nil {
		return nil, errors.Join(err, topo.Close())
	}
	return b, nil
}

func (b *bench) start(mode string) (err error) {
	if b.holder, err = startHolder(b.topo, mode); err != nil {
		return err
	}
	if b.host, err = start(b.topo.Node.Command("/proc/self/exe"), "client"); err != nil {
		return err
	}
	if b.pod, err = start(b.topo.RoutedPods[0].Command("/proc/self/exe"), "client"); err != nil {
		return err
	}
	return b.set(opOff)
}

func (b *bench) end() error {
	return errors.Join(b.set(opOff), b.host.end(), b.pod.end(), b.holder.end())
}

func (b *bench) set(op string) error {
	ports, err := ask[map[string]rules.Ports](b.holder, holderRequest{op, b.state})
	b.ports = ports["kas"]
	return err
}

// one measures everything with the mode off or on.
func (b *bench) one(op string, results map[string]*pairs) error {
	if err := b.set(op); err != nil {
		return err
	}
	record := func(name string, from *worker, q clientRequest) error {
		v, err := ask[float64](from, q)
		if err != nil {
			return fmt.Errorf("%s: %w", name, err)
		}
		p := results[name]
		if p == nil {
			p = &pairs{}
			results[name] = p
		}
		if op == opOff {
			p.Off = append(p.Off, v)
		} else {
			p.On = append(p.On, v)
		}
		return nil
	}
	var errs []error
	for _, c := range []struct {
		label string
		from  *worker
		pod   bool
	}{{"host", b.host, false}, {"pod", b.pod, true}} {
		to := listenerOf(b.state, b.ports, c.pod)
		if op == opOn {
			to = kas
		}
		errs = append(errs,
			record(c.label+" unmatched connect", c.from, clientRequest{opRefused, nobody, refusals}),
			record(c.label+" connect + echo", c.from, clientRequest{opConnect, to, connects}),
			record(c.label+" round trip", c.from, clientRequest{opRTT, to, roundsRTT}),
			record(c.label+" throughput", c.from, clientRequest{opStream, to, int(streamFor.Milliseconds())}))
	}
	// A refusal by the mode beside one by the kernel.
	refused := nobody
	if op == opOn {
		refused = kas
		errs = append(errs, b.set(opRefuse))
	}
	errs = append(errs,
		record("host refused connect", b.host, clientRequest{opRefused, refused, refusals}),
		record("pod refused connect", b.pod, clientRequest{opRefused, refused, refusals}))
	return errors.Join(errs...)
}
