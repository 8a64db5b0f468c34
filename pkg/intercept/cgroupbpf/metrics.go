package cgroupbpf

import (
	"maps"
	"slices"
	"sync"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/bpf"
	"github.com/kasway/kasway/pkg/rules"
)

// Metrics shows what the programs have counted. It is safe for concurrent use.
type Metrics struct {
	connects *prometheus.Desc

	mu     sync.Mutex
	counts *ebpf.Map // nil: nothing is installed
	names  []string  // of the targets, by their index in counts
	base   []uint64  // what counts held when the names became these
	// before is what was counted until then: a counter never falls.
	before map[series]uint64
}

// series is one line of the metric.
type series struct {
	target          string
	client, verdict int
}

const verdicts = int(bpf.KaswayKwVerdictKW_VERDICTS)

const (
	// counted is how many targets have counters of their own (KW_COUNTED of
	// bpf/types.h), which bounds the label.
	counted = 64
	// otherTargets is the label of all others; no target can be named so.
	otherTargets = "(others)"
)

// NewMetrics makes the metrics and registers them; a nil reg leaves them
// unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{before: map[series]uint64{}, connects: prometheus.NewDesc("kasway_agent_ebpf_connects_total",
		"Connects to addresses of a target, by whose they are and what became of them in the kernel.", []string{"target", "client", "verdict"}, nil)}
	if reg != nil {
		reg.MustRegister(m)
	}
	return m
}

// read takes the counts from another map, whose targets have no names yet, or
// from none.
func (m *Metrics) read(counts *ebpf.Map) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before = m.sums()
	m.counts, m.names, m.base = counts, nil, nil
}

// name says which targets the map's indexes stand for from now on.
func (m *Metrics) name(s rules.State) {
	var names []string
	for i := range min(len(s.Diverts), counted) {
		names = append(names, s.Diverts[i].Name)
	}
	if len(s.Diverts) > counted {
		names = append(names, otherTargets)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if slices.Equal(names, m.names) {
		return
	}
	m.before = m.sums()
	m.names, m.base = names, nil
	m.base = m.raw()
}

// raw sums up the counts of the named targets over all CPUs, as they lie in the
// map. Callers hold mu.
func (m *Metrics) raw() []uint64 {
	out := make([]uint64, len(m.names)*2*verdicts)
	if m.counts == nil {
		return out
	}
	for i := range out {
		var perCPU []uint64
		if m.counts.Lookup(uint32(i), &perCPU) != nil {
			continue // it ends at this moment
		}
		for _, n := range perCPU {
			out[i] += n
		}
	}
	return out
}

// sums are the counts since the start of the process. Callers hold mu.
func (m *Metrics) sums() map[series]uint64 {
	out := maps.Clone(m.before)
	for i, n := range m.raw() {
		s := series{m.names[i/(2*verdicts)], i / verdicts % 2, i % verdicts}
		out[s] += n - min(n, m.base[i])
	}
	return out
}

// Names of verdicts and clients, in the order of the map.
var (
	verdictNames = [verdicts]string{"passed", "diverted", "refused", "refused_down", "passed_down", "own", "bound_to_device"}
	clientNames  = [2]string{"host", "pods"}
)

// Describe implements prometheus.Collector.
func (m *Metrics) Describe(ch chan<- *prometheus.Desc) { ch <- m.connects }

// Collect implements prometheus.Collector.
func (m *Metrics) Collect(ch chan<- prometheus.Metric) {
	m.mu.Lock()
	sums := m.sums()
	m.mu.Unlock()
	for s, n := range sums {
		ch <- prometheus.MustNewConstMetric(m.connects, prometheus.CounterValue, float64(n), s.target, clientNames[s.client], verdictNames[s.verdict])
	}
}
