package intercept

import (
	"errors"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/pkg/dial"
)

// Metrics counts what happens to connections on their way in. Its labels come
// from the configuration and from this package, never from a peer.
type Metrics struct {
	taken           *prometheus.CounterVec
	refused         *prometheus.CounterVec
	active          prometheus.Gauge
	held            prometheus.Gauge
	bytes           *prometheus.CounterVec
	acceptErrors    prometheus.Counter
	backlogged      prometheus.Counter
	lost            prometheus.Counter
	heartbeatMissed prometheus.Counter
	heartbeatFailed prometheus.Counter
	late            atomic.Int64 // when a heartbeat came late the last time, in Unix nanoseconds
	mode            *prometheus.GaugeVec
	modeSkipped     *prometheus.GaugeVec
}

// NewMetrics makes the metrics and registers them; a nil reg leaves them
// unregistered.
func NewMetrics(reg prometheus.Registerer) *Metrics {
	const prefix = "kasway_agent_intercept_"
	counter := func(name, help string) prometheus.Counter {
		return prometheus.NewCounter(prometheus.CounterOpts{Name: prefix + name, Help: help})
	}
	counters := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: prefix + name, Help: help}, labels)
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: prefix + name, Help: help})
	}
	gauges := func(name, help string, labels ...string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: prefix + name, Help: help}, labels)
	}
	m := &Metrics{
		taken:        counters("taken_total", "Connections accepted for a target.", "target"),
		refused:      counters("refused_total", "Accepted connections that were reset instead of carried.", "reason"),
		active:       gauge("connections", "Connections taken and not yet ended."),
		held:         gauge("held", "Connections that wait for a way to their target."),
		bytes:        counters("bytes_total", "Bytes of ended connections.", "direction"),
		acceptErrors: counter("accept_errors_total", "Failed accepts, such as for want of file descriptors."),
		backlogged:   counter("backlogged_total", "Connections that the kernel accepted a second or more before this process took them, as while it was frozen."),
		lost: prometheus.NewCounter(prometheus.CounterOpts{
			Name: "kasway_agent_attribution_lost_total",
			Help: "Connections of which this node should know who made them, and does not: rules about uids and units deny them.",
		}),
		heartbeatMissed: counter("heartbeat_missed_total", "Heartbeats that came at least one interval late."),
		heartbeatFailed: counter("heartbeat_failed_total", "Heartbeats that the kernel did not take."),
		mode:            gauges("mode", "1 for the mode in use.", "mode"),
		modeSkipped:     gauges("mode_skipped", "1 for a mode that could not be used, with the kind of reason.", "mode", "reason"),
	}
	if reg != nil {
		reg.MustRegister(m.taken, m.refused, m.active, m.held, m.bytes, m.acceptErrors, m.backlogged, m.lost,
			m.heartbeatMissed, m.heartbeatFailed, m.mode, m.modeSkipped)
	}
	return m
}

// LateSince says whether a heartbeat has come late since then: this process did
// not run as it should, and the kernel may have taken it for dead. It may be
// called concurrently.
func (m *Metrics) LateSince(then time.Time) bool {
	late := m.late.Load()
	return late != 0 && !time.Unix(0, late).Before(then)
}

// orUnregistered lets every constructor do without metrics.
func orUnregistered(m *Metrics) *Metrics {
	if m == nil {
		return NewMetrics(nil)
	}
	return m
}

// Why an accepted connection was reset, where no sentinel of package dial says
// it already.
var (
	// ErrStranger: the peer is not of this node.
	ErrStranger = errors.New("peer is not of this node")
	// ErrOwn: the peer is this agent itself.
	ErrOwn = errors.New("connection comes from this agent itself")
	// ErrHeldTooLong: no way to the target came up in time.
	ErrHeldTooLong = errors.New("held until the limit, no way to the target")
	// ErrClosedGate: the target is refused at this moment.
	ErrClosedGate = errors.New("target is refused at this moment")
	// ErrClientGone: the client gave up before it was connected.
	ErrClientGone = errors.New("client gave up")
	// ErrStopped: the agent is stopping.
	ErrStopped = errors.New("agent is stopping")
)

// reason names err for the metric and the log.
func reason(err error) string {
	for _, r := range []struct {
		err  error
		name string
	}{
		{ErrStranger, "stranger"}, {ErrOwn, "own"}, {ErrHeldTooLong, "held"}, {ErrClosedGate, "closed"},
		{ErrClientGone, "client_gone"}, {ErrStopped, "stopped"},
		{dial.ErrRefused, "refused"}, {dial.ErrDenied, "denied"}, {dial.ErrUnreachable, "unreachable"},
		{dial.ErrTimeout, "timeout"}, {dial.ErrNoUpstream, "no_upstream"}, {dial.ErrNoLink, "no_link"},
		{dial.ErrLimit, "limit"}, {dial.ErrLost, "lost"},
	} {
		if errors.Is(err, r.err) {
			return r.name
		}
	}
	return "other"
}
