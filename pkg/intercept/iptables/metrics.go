package iptables

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/promauto"
)

// Metrics counts what mode iptables has to put right.
type Metrics struct {
	repairs, failures prometheus.Counter
}

// NewMetrics registers them at reg; nil leaves them unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	f := promauto.With(reg)
	return &Metrics{
		repairs: f.NewCounter(prometheus.CounterOpts{
			Name: "kasway_agent_iptables_repairs_total",
			Help: "Times that a rule of ours was not first or gone, or a set gone, and was put back.",
		}),
		failures: f.NewCounter(prometheus.CounterOpts{
			Name: "kasway_agent_iptables_check_failures_total",
			Help: "Times that the rules could not be checked or put back.",
		}),
	}
}
