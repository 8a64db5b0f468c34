package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// Status is what an agent says of itself on its admin socket.
type Status struct {
	Version    string          `json:"version"`
	Generation string          `json:"generation"`
	Started    time.Time       `json:"started"`
	Ready      bool            `json:"ready"`
	NotReady   string          `json:"notReady,omitempty"`
	Mode       string          `json:"mode,omitempty"`
	WhenDown   string          `json:"whenDown"`
	Skipped    []SkippedStatus `json:"skipped,omitempty"`
	Targets    []TargetStatus  `json:"targets"`
	Links      []LinkStatus    `json:"links"`
	// State is what is installed, and Bind where mode listen listens.
	State rules.State  `json:"state"`
	Bind  []netip.Addr `json:"bind,omitempty"`
}

// SkippedStatus is a mode that was not chosen, and why.
type SkippedStatus struct {
	Mode   string `json:"mode"`
	Reason string `json:"reason"`
	Remedy string `json:"remedy,omitempty"`
}

// TargetStatus is one target: what is diverted, and what happens to it now
// (open, held or refused).
type TargetStatus struct {
	Name      string   `json:"name"`
	State     string   `json:"state"`
	Addresses []string `json:"addresses"`
}

// LinkStatus is one link to a server.
type LinkStatus struct {
	Server    string          `json:"server"`
	State     string          `json:"state"`
	Since     time.Time       `json:"since"`
	RTT       time.Duration   `json:"rttNanoseconds,omitempty"`
	Version   string          `json:"version,omitempty"`
	Streams   int             `json:"streams"`
	LastError string          `json:"lastError,omitempty"`
	Targets   map[string]bool `json:"targets,omitempty"`
}

// view is what status shows and other goroutines change.
type view struct {
	try, others []intercept.Candidate
	metrics     *intercept.Metrics

	mu     sync.Mutex
	choice intercept.Choice
	state  rules.State
}

func (v *view) setChoice(c intercept.Choice, s rules.State) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.choice, v.state = c, s
}

func (v *view) setState(s rules.State) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state = s
}

func (v *view) get() (intercept.Choice, rules.State) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.choice, v.state
}

// ready is nil when connections of every target are diverted and carried.
func (a *Agent) ready() error {
	choice, _ := a.view.get()
	if choice.Mode == nil {
		return errors.New("nothing is diverted yet")
	}
	var held []string
	for _, t := range a.cfg.Agent.Targets {
		if !a.cfg.Links.Carries(t.Name) {
			held = append(held, t.Name)
		}
	}
	if len(held) == 0 {
		return nil
	}
	why := "its server reports the upstreams as down"
	up := false
	for _, l := range a.cfg.Links.Status() {
		up = up || l.State == "up"
	}
	if !up {
		why = "no link to a server is up"
	}
	return fmt.Errorf("no way to %s: %s", strings.Join(held, ", "), why)
}

// Status may be called from any goroutine.
func (a *Agent) Status() Status {
	choice, state := a.view.get()
	s := Status{
		Version: observe.Version, Generation: a.cfg.Generation, Started: a.start,
		Mode: choice.Name, WhenDown: string(a.cfg.Agent.Intercept.WhenDown), Links: a.cfg.Links.Status(),
		Targets: []TargetStatus{}, State: state,
	}
	if a.placed.fixed {
		s.Bind = a.placed.listen
	}
	if err := a.ready(); err != nil {
		s.NotReady = err.Error()
	} else {
		s.Ready = true
	}
	for _, k := range choice.Skipped {
		s.Skipped = append(s.Skipped, SkippedStatus{Mode: k.Mode, Reason: k.Err.Error(), Remedy: k.Remedy})
	}
	for _, d := range state.Diverts {
		if d.Name == intercept.SelfTestName {
			continue
		}
		t := TargetStatus{Name: d.Name, State: a.gates.State(d.Name).String(), Addresses: []string{}}
		for _, e := range d.Entries {
			t.Addresses = append(t.Addresses, rules.Address{Prefix: e.Prefix, Port: e.Port}.String())
		}
		if a.placed.fixed {
			for _, at := range intercept.Placed(a.placed.listen, d.Ports) {
				t.Addresses = append(t.Addresses, at.String())
			}
		}
		s.Targets = append(s.Targets, t)
	}
	return s
}

// metrics are the agent's own.
type metrics struct{ applyFailed prometheus.Counter }

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{applyFailed: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kasway_agent_apply_failures_total",
		Help: "Changes of what is diverted that could not be installed at the first try.",
	})}
	if reg != nil {
		reg.MustRegister(m.applyFailed)
	}
	return m
}
