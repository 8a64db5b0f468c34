package intercept

import (
	"runtime"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

// HeartbeatInterval is how often a Mode renews what the kernel forgets
// HeartbeatTimeout later. The two bound how long connects meet a dead or frozen
// agent: five beats may be missed before a stall of the CPU shows.
const (
	HeartbeatInterval = 500 * time.Millisecond
	HeartbeatTimeout  = 2500 * time.Millisecond
)

// StartHeartbeat calls beat at once and then every interval, on an OS thread of
// its own that works in the network namespace of the calling thread, until
// stop is called. stop waits for the last beat to end, and may be called more
// than once. A failing beat is logged when it starts and when it ends to fail;
// beats that come late are counted.
func StartHeartbeat(interval time.Duration, beat func() error, log logrus.FieldLogger, m *Metrics) (stop func()) {
	h := &heartbeat{
		interval: interval, beat: beat, log: log, metrics: orUnregistered(m),
		quit: make(chan struct{}), done: make(chan struct{}),
	}
	ns, err := callersNamespace()
	go h.run(ns, err)
	return h.stop
}

type heartbeat struct {
	interval time.Duration
	beat     func() error
	log      logrus.FieldLogger
	metrics  *Metrics
	failing  bool
	quit     chan struct{}
	done     chan struct{}
	once     sync.Once
}

func (h *heartbeat) stop() {
	h.once.Do(func() { close(h.quit) })
	<-h.done
}

func (h *heartbeat) run(ns namespace, err error) {
	defer close(h.done)
	// Never unlocked: the thread ends with the goroutine, so that nobody else
	// inherits its namespace, and no other goroutine ever waits for it or it
	// for one.
	runtime.LockOSThread()
	if err == nil {
		err = ns.enter()
	}
	if err != nil {
		h.log.WithError(err).Error("heartbeat: not in the agent's network namespace")
	}
	tick := time.NewTicker(h.interval)
	defer tick.Stop()
	for last := time.Now(); ; {
		h.one()
		select {
		case <-h.quit:
			return
		case <-tick.C:
		}
		h.late(time.Since(last))
		last = time.Now()
	}
}

// one beats once.
func (h *heartbeat) one() {
	err := h.beat()
	if err != nil {
		h.metrics.heartbeatFailed.Inc()
	}
	switch failing := err != nil; {
	case failing && !h.failing:
		h.failing = true
		h.log.WithError(err).Error("heartbeat fails: the node will take this agent for dead")
	case !failing && h.failing:
		h.failing = false
		h.log.Info("heartbeat works again")
	}
}

// late counts the beats that a gap has swallowed.
func (h *heartbeat) late(gap time.Duration) {
	missed := int(gap/h.interval) - 1
	if missed < 1 {
		return
	}
	h.metrics.heartbeatMissed.Add(float64(missed))
	h.metrics.late.Store(time.Now().UnixNano())
	if gap >= HeartbeatTimeout {
		h.log.Warnf("heartbeat: this process did not run for %v, long enough to be taken for dead", gap.Round(time.Millisecond))
	}
}
