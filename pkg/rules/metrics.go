package rules

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics counts what the Resolver meets.
type Metrics struct {
	failures prometheus.Counter
	failing  prometheus.Gauge
}

// NewMetrics registers them at reg; nil leaves them unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	return &Metrics{
		failures: f.NewCounter(prometheus.CounterOpts{
			Name: "kasway_agent_resolve_failures_total",
			Help: "Attempts to resolve a target's host name that failed.",
		}),
		failing: f.NewGauge(prometheus.GaugeOpts{
			Name: "kasway_agent_resolve_failing",
			Help: "Host names of targets whose last attempt to resolve failed; their last good answers stay in use.",
		}),
	}
}
