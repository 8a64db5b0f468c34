package agent

import (
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// The phases of an agent among those of its node.
const (
	// PhaseStarting: it diverts nothing yet.
	PhaseStarting = "starting"
	// PhaseDiverting: connects come to it.
	PhaseDiverting = "diverting"
	// PhaseDraining: another agent has taken over, and this one serves what it
	// holds.
	PhaseDraining = "draining"
	// PhaseDrained: it holds nothing any more and waits to be stopped.
	PhaseDrained = "drained"
	// PhaseStopping: it ends.
	PhaseStopping = "stopping"
)

var phases = []string{PhaseStarting, PhaseDiverting, PhaseDraining, PhaseDrained, PhaseStopping}

// DrainStatus says how far an agent has come with what it holds.
type DrainStatus struct {
	// By is the generation of the agent that has taken over.
	By    string    `json:"by"`
	Since time.Time `json:"since"`
	// Resets is when the first connection is reset, and Ends when the last one
	// is, if they do not end before.
	Resets time.Time `json:"resets"`
	Ends   time.Time `json:"ends"`
	// Connections are those left; Ended have ended by themselves, Reset were
	// reset.
	Connections int `json:"connections"`
	Ended       int `json:"ended"`
	Reset       int `json:"reset"`
}

// String is d for people.
func (d DrainStatus) String() string {
	if d.Connections == 0 {
		return fmt.Sprintf("%d connections ended, %d were reset", d.Ended, d.Reset)
	}
	left := connections(d.Connections) + " left"
	if d.Reset > 0 {
		left += fmt.Sprintf(", %d reset", d.Reset)
	}
	return left + ", ends by " + d.Ends.Format(time.TimeOnly)
}

func connections(n int) string {
	if n == 1 {
		return "1 connection"
	}
	return fmt.Sprintf("%d connections", n)
}

// role is the agent's place among those of its node, for whoever asks.
type role struct {
	metrics *metrics

	mu    sync.Mutex
	phase string
	// waits is why an agent that starts does not go on, or is not ready though
	// it diverts; "": it does not wait.
	waits   string
	drain   DrainStatus
	changed chan struct{} // of phase
}

func newRole(m *metrics) *role {
	r := &role{metrics: m, changed: make(chan struct{})}
	r.enter(PhaseStarting)
	return r
}

func (r *role) enter(phase string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.phase = phase
	for _, p := range phases {
		r.metrics.phase.WithLabelValues(p).Set(map[bool]float64{p == phase: 1}[true])
	}
	close(r.changed)
	r.changed = make(chan struct{})
}

func (r *role) waiting(why string) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.waits = why
}

func (r *role) draining(d DrainStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.drain = d
}

// leads says whether operators are this agent's to answer, and what is closed
// when that may have changed.
func (r *role) leads() (bool, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.phase != PhaseDraining && r.phase != PhaseDrained, r.changed
}

// get returns the phase, why the agent waits, and of a superseded one how far
// it has come.
func (r *role) get() (phase, waits string, d DrainStatus) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.phase, r.waits, r.drain
}

// unready is why an agent in this place is not ready; nil: it may be.
func (r *role) unready() error {
	phase, waits, d := r.get()
	switch {
	case phase == PhaseDraining:
		return fmt.Errorf("agent %s has taken over: draining, %s", d.By, d)
	case phase == PhaseDrained:
		return fmt.Errorf("agent %s has taken over: drained, %s", d.By, d)
	case phase == PhaseStopping:
		return fmt.Errorf("the agent is stopping")
	case waits != "":
		return fmt.Errorf("%s", waits)
	case phase == PhaseStarting:
		return fmt.Errorf("nothing is diverted yet")
	}
	return nil
}

// among names generations for people.
func among(generations []string) string {
	if len(generations) == 1 {
		return "agent " + generations[0]
	}
	return "agents " + strings.Join(generations, ", ")
}

// Why a connection of a superseded agent has ended.
const (
	drainedEnded = "ended" // by itself
	drainedQuiet = "quiet" // reset in a silence
	drainedBusy  = "busy"  // reset though bytes had passed just before
)

func newDrained() *prometheus.CounterVec {
	c := prometheus.NewCounterVec(prometheus.CounterOpts{
		Name: "kasway_agent_drained_total",
		Help: "Connections that this agent held when another one had taken over, by how they ended: by themselves, reset while quiet, reset while busy.",
	}, []string{"reason"})
	for _, r := range []string{drainedEnded, drainedQuiet, drainedBusy} {
		c.WithLabelValues(r)
	}
	return c
}

func newPhase() *prometheus.GaugeVec {
	return prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kasway_agent_phase",
		Help: "1 for what the agent is doing: starting, diverting, draining or drained after another one has taken over, stopping.",
	}, []string{"phase"})
}
