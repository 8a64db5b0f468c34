package nft

import "github.com/prometheus/client_golang/prometheus"

// Metrics counts what a Mode or ListenGuard had to put right.
type Metrics struct {
	repairs prometheus.Counter
}

// NewMetrics makes the metrics and registers them; a nil reg leaves them
// unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	m := &Metrics{repairs: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kasway_agent_nft_repairs_total",
		Help: "Times that nftables tables of ours had been changed or removed by somebody and were made anew.",
	})}
	if reg != nil {
		reg.MustRegister(m.repairs)
	}
	return m
}
