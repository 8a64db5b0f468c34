package upstream

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// Metrics are those of every pool of a process. Their labels come from the
// configuration alone. A nil *Metrics measures nothing.
type Metrics struct {
	up      *prometheus.GaugeVec
	dials   *prometheus.CounterVec
	seconds *prometheus.HistogramVec
}

// NewMetrics registers the metrics of the pools.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{
		up: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "kasway_server_upstream_up",
			Help: "Whether an upstream's address is believed up.",
		}, []string{"upstream", "address"}),
		dials: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "kasway_server_upstream_dials_total",
			Help: "Attempts to connect to an upstream's address, probes included, by result.",
		}, []string{"upstream", "address", "result"}),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name:    "kasway_server_upstream_dial_seconds",
			Help:    "How long connecting to an upstream took, where it succeeded.",
			Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5},
		}, []string{"upstream"}),
	}
	reg.MustRegister(m.up, m.dials, m.seconds)
	return m
}

func (m *Metrics) setUp(upstream, address string, up bool) {
	if m == nil {
		return
	}
	v := 0.0
	if up {
		v = 1
	}
	m.up.WithLabelValues(upstream, address).Set(v)
}

func (m *Metrics) dialled(upstream, address string, err error, took time.Duration) {
	if m == nil {
		return
	}
	m.dials.WithLabelValues(upstream, address, result(err)).Inc()
	if err == nil {
		m.seconds.WithLabelValues(upstream).Observe(took.Seconds())
	}
}
