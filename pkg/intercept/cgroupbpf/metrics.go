package cgroupbpf

import (
	"sync"

	"github.com/cilium/ebpf"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/bpf"
)

// Metrics shows what the programs have counted. It is safe for concurrent use.
type Metrics struct {
	connects *prometheus.Desc

	mu     sync.Mutex
	counts *ebpf.Map // nil: nothing is installed
	// before is what earlier installations have counted: a counter never falls.
	before [2][verdicts]uint64
}

const verdicts = int(bpf.KaswayKwVerdictKW_VERDICTS)

// counted is how many targets have counters of their own, with the one that all
// others share (KW_COUNTED of bpf/types.h).
const counted = 65

// NewMetrics makes the metrics and registers them; a nil reg leaves them
// unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{connects: prometheus.NewDesc("kasway_agent_ebpf_connects_total",
		"Connects to addresses of targets, by whose they are and what became of them in the kernel.", []string{"client", "verdict"}, nil)}
	if reg != nil {
		reg.MustRegister(m)
	}
	return m
}

// read takes the counts from another map, or from none.
func (m *Metrics) read(counts *ebpf.Map) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.before = m.sums()
	m.counts = counts
}

// sums adds up all targets and CPUs. Callers hold mu.
func (m *Metrics) sums() [2][verdicts]uint64 {
	out := m.before
	if m.counts == nil {
		return out
	}
	for i := range counted * 2 * verdicts {
		var perCPU []uint64
		if m.counts.Lookup(uint32(i), &perCPU) != nil {
			continue // it ends at this moment
		}
		for _, n := range perCPU {
			out[i/verdicts%2][i%verdicts] += n
		}
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
	for c, of := range sums {
		for v, n := range of {
			ch <- prometheus.MustNewConstMetric(m.connects, prometheus.CounterValue, float64(n), clientNames[c], verdictNames[v])
		}
	}
}
