package tunnel

import "github.com/prometheus/client_golang/prometheus"

// byteCounters count what a Conn sends and receives.
type byteCounters struct{ sent, received prometheus.Counter }

// streamMetrics are the same on both sides.
type streamMetrics struct {
	opened prometheus.Counter
	active prometheus.Gauge
	ended  *prometheus.CounterVec // by result
	bytes  byteCounters
}

func newStreamMetrics(side string, reg prometheus.Registerer) streamMetrics {
	bytes := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: side + "_stream_bytes_total", Help: "Bytes carried by streams, by direction.",
	}, []string{"direction"})
	m := streamMetrics{
		opened: prometheus.NewCounter(prometheus.CounterOpts{
			Name: side + "_streams_opened_total", Help: "Streams opened.",
		}),
		active: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: side + "_streams_active", Help: "Streams open now.",
		}),
		ended: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: side + "_streams_ended_total", Help: "Streams ended, by result.",
		}, []string{"result"}),
		bytes: byteCounters{sent: bytes.WithLabelValues("sent"), received: bytes.WithLabelValues("received")},
	}
	register(reg, bytes, m.opened, m.active, m.ended)
	return m
}

// LinksMetrics are the metrics of an agent's links.
type LinksMetrics struct {
	up         prometheus.Gauge
	reconnects prometheus.Counter
	failures   *prometheus.CounterVec // by step
	streams    streamMetrics
}

// NewLinksMetrics makes the metrics of Links; reg may be nil.
func NewLinksMetrics(reg prometheus.Registerer) *LinksMetrics {
	const side = "kasway_agent"
	m := &LinksMetrics{
		up: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: side + "_links_up", Help: "Links that are up.",
		}),
		reconnects: prometheus.NewCounter(prometheus.CounterOpts{
			Name: side + "_link_reconnects_total", Help: "Links that came up again after having been lost.",
		}),
		failures: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: side + "_link_failures_total", Help: "Attempts to bring up a link that failed, and links lost, by the step that failed.",
		}, []string{"step"}),
		streams: newStreamMetrics(side, reg),
	}
	register(reg, m.up, m.reconnects, m.failures)
	return m
}

// ServerMetrics are the metrics of a server's agent port.
type ServerMetrics struct {
	links      prometheus.Gauge
	opened     prometheus.Counter
	handshakes *prometheus.CounterVec // by reason
	badOpens   *prometheus.CounterVec // by kind
	streams    streamMetrics
}

// NewServerMetrics makes the metrics of a Server; reg may be nil.
func NewServerMetrics(reg prometheus.Registerer) *ServerMetrics {
	const side = "kasway_server"
	m := &ServerMetrics{
		links: prometheus.NewGauge(prometheus.GaugeOpts{
			Name: side + "_links_up", Help: "Agents' links that are up.",
		}),
		opened: prometheus.NewCounter(prometheus.CounterOpts{
			Name: side + "_links_opened_total", Help: "Links whose agents were accepted.",
		}),
		handshakes: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: side + "_handshake_failures_total", Help: "Connections to the agents' port that did not become a link, by reason.",
		}, []string{"reason"}),
		badOpens: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: side + "_bad_opens_total", Help: "Streams refused because their OPEN breaks the protocol, by what is wrong.",
		}, []string{"kind"}),
		streams: newStreamMetrics(side, reg),
	}
	register(reg, m.links, m.opened, m.handshakes, m.badOpens)
	return m
}

func register(reg prometheus.Registerer, cs ...prometheus.Collector) {
	if reg != nil {
		reg.MustRegister(cs...)
	}
}
