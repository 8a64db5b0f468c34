package agent

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"slices"
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
	Version    string    `json:"version"`
	Generation string    `json:"generation"`
	Started    time.Time `json:"started"`
	// Phase is one of the Phase constants; Drain says how far a superseded agent
	// has come.
	Phase    string       `json:"phase"`
	Drain    *DrainStatus `json:"drain,omitempty"`
	Ready    bool         `json:"ready"`
	NotReady string       `json:"notReady,omitempty"`
	Mode     string       `json:"mode,omitempty"`
	// Detail is what the mode says of itself, such as where it is attached.
	Detail   []string        `json:"detail,omitempty"`
	WhenDown string          `json:"whenDown"`
	Skipped  []SkippedStatus `json:"skipped,omitempty"`
	Targets  []TargetStatus  `json:"targets"`
	Links    []LinkStatus    `json:"links"`
	// State is what is installed, and Bind where mode listen listens.
	State rules.State  `json:"state"`
	Bind  []netip.Addr `json:"bind,omitempty"`
}

// detailer is a mode with more to say for people than its name; Detail may be
// called from any goroutine.
type detailer interface{ Detail() []string }

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
	// Connections are those carried now.
	Connections ConnCounts `json:"connections"`
}

// LinkUp is the State of a link that carries.
const LinkUp = "up"

// LinkStatus is one link to a server; its State is a word for people, of which
// only LinkUp has a meaning here.
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
	failed error // why what is wanted now is not installed
	gone   error // why the node's addresses are not all there
	unheld error // why what is put back cannot be relied on
}

func (v *view) setChoice(c intercept.Choice, s rules.State) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.choice, v.state = c, s
}

func (v *view) setState(s rules.State) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.state, v.failed = s, nil
}

func (v *view) setFailed(err error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.failed = err
}

// get returns also what is broken, if anything is.
func (v *view) get() (intercept.Choice, rules.State, error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	broken := v.unheld
	if v.gone != nil {
		broken = v.gone
	}
	if v.failed != nil {
		broken = fmt.Errorf("the last change of what is diverted could not be installed: %w", v.failed)
	}
	return v.choice, v.state, broken
}

// setAddresses notes whether the node's addresses are there, and returns what
// was noted before.
func (v *view) setAddresses(err error) (was error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	was, v.gone = v.gone, err
	return was
}

// setUnheld notes why what is installed does not hold; nil: it does.
func (v *view) setUnheld(why error) {
	v.mu.Lock()
	defer v.mu.Unlock()
	v.unheld = why
}

// ready is nil when connections of every target are diverted and carried.
func (a *Agent) ready() error {
	choice, state, broken := a.view.get()
	if err := a.role.unready(); err != nil {
		return err
	}
	switch unresolved := a.unresolved(state); {
	case choice.Mode == nil:
		return errors.New("nothing is diverted yet")
	case broken != nil:
		return broken
	case len(unresolved) > 0:
		return fmt.Errorf("nothing is diverted for %s: none of its names has an address yet", strings.Join(unresolved, ", "))
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
	why := "no link to a server is up"
	if slices.ContainsFunc(a.cfg.Links.Status(), func(l LinkStatus) bool { return l.State == LinkUp }) {
		why = "the servers report the upstreams as down"
	}
	return fmt.Errorf("no way to %s: %s", strings.Join(held, ", "), why)
}

// unresolved are the targets of which no address is known.
func (a *Agent) unresolved(s rules.State) (names []string) {
	for _, d := range s.Diverts {
		if !a.placed.fixed && len(d.Entries) == 0 && d.Name != intercept.SelfTestName {
			names = append(names, d.Name)
		}
	}
	return names
}

// Status may be called from any goroutine.
func (a *Agent) Status() Status {
	choice, state, _ := a.view.get()
	s := Status{
		Version: observe.Version, Generation: a.cfg.Generation, Started: a.start,
		Mode: choice.Name, WhenDown: string(a.cfg.Agent.Intercept.WhenDown), Links: a.cfg.Links.Status(),
		Targets: []TargetStatus{}, State: state,
	}
	if a.placed.fixed {
		s.Bind = a.placed.listen
	}
	if m, ok := choice.Mode.(detailer); ok {
		s.Detail = m.Detail()
	}
	var d DrainStatus
	if s.Phase, _, d = a.role.get(); d.By != "" {
		s.Drain = &d
	}
	if err := a.ready(); err != nil {
		s.NotReady = err.Error()
	} else {
		s.Ready = true
	}
	for _, k := range choice.Skipped {
		s.Skipped = append(s.Skipped, SkippedStatus{Mode: k.Mode, Reason: k.Err.Error(), Remedy: k.Remedy})
	}
	carried := a.connCounts()
	for _, d := range state.Diverts {
		if d.Name == intercept.SelfTestName {
			continue
		}
		t := TargetStatus{
			Name: d.Name, State: a.gates.State(d.Name).String(), Addresses: []string{}, Connections: carried[d.Name],
		}
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
type metrics struct {
	applyFailed prometheus.Counter
	drained     *prometheus.CounterVec
	phase       *prometheus.GaugeVec

	repairs      *prometheus.CounterVec
	verifyFailed prometheus.Counter
}

func newMetrics(reg prometheus.Registerer) *metrics {
	m := &metrics{applyFailed: prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kasway_agent_apply_failures_total",
		Help: "Attempts to change what is diverted that failed; each is repeated after a second.",
	}), drained: newDrained(), phase: newPhase(), repairs: newRepairs(), verifyFailed: newVerifyFailed()}
	if reg != nil {
		reg.MustRegister(m.applyFailed, m.drained, m.phase, m.repairs, m.verifyFailed)
		intercept.NewConntrackMetrics(reg, os.ReadFile)
	}
	return m
}
