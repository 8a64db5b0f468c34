package access

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts refusals. A nil *Metrics counts nothing.
type Metrics struct{ refused *prometheus.CounterVec }

// NewServerMetrics registers the metrics of the server's guard.
func NewServerMetrics(reg prometheus.Registerer) *Metrics {
	return newMetrics(reg, "kasway_server_refused_total",
		"Connections that the server's policy refused.",
		ReasonUnidentified, ReasonUnknown, ReasonForbidden, ReasonAddress)
}

// NewAgentMetrics registers the metrics of the agent's guard.
func NewAgentMetrics(reg prometheus.Registerer) *Metrics {
	return newMetrics(reg, "kasway_agent_refused_total",
		"Connections of local clients that the agent's rules refused.",
		ReasonRule, ReasonUIDUnknown, ReasonUnitUnknown, ReasonClientUnknown)
}

func newMetrics(reg prometheus.Registerer, name, help string, reasons ...Reason) *Metrics {
	m := &Metrics{prometheus.NewCounterVec(prometheus.CounterOpts{Name: name, Help: help}, []string{"reason"})}
	// A counter that is there at 0 tells "none yet" from "not watched".
	for _, r := range reasons {
		m.refused.WithLabelValues(string(r))
	}
	reg.MustRegister(m.refused)
	return m
}

func (m *Metrics) refuse(r Reason) {
	if m != nil {
		m.refused.WithLabelValues(string(r)).Inc()
	}
}
