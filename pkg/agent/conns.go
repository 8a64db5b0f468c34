package agent

import (
	"fmt"
	"net/netip"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/workload"
)

// who makes what finds out who the clients are.
func (a *Agent) who(m *intercept.Metrics) (*intercept.Who, error) {
	sockets, err := intercept.NewSockets()
	if err != nil && a.cfg.NeedWho {
		return nil, fmt.Errorf("guard rules ask for uids or units: %w", err)
	}
	if err != nil {
		a.log.WithError(err).Warn("who the host's clients are is not known")
	}
	return intercept.NewWho(intercept.WhoConfig{Sockets: sockets, Workloads: a.cfg.Workloads, Metrics: m}), nil
}

// telling makes each candidate tell who of its clients, from its first one on.
func telling(who *intercept.Who, candidates []intercept.Candidate) []intercept.Candidate {
	out := make([]intercept.Candidate, 0, len(candidates))
	for _, c := range candidates {
		made := c.New
		c.New = func() (intercept.Mode, error) {
			m, err := made()
			if err == nil {
				who.SetMode(m)
			}
			return m, err
		}
		out = append(out, c)
	}
	return out
}

// ConnStatus is one connection that is carried now. What is not known of its
// client is left out.
type ConnStatus struct {
	// ID is the same in the logs of both sides.
	ID     string              `json:"id"`
	Target string              `json:"target"`
	State  intercept.ConnState `json:"state"`
	// Draining: the agent that carries it has been followed by another one, and
	// ends it at the end of its grace if the client does not before.
	Draining bool           `json:"draining,omitempty"`
	Since    time.Time      `json:"since"`
	Client   netip.AddrPort `json:"client"`
	// Pod says that the client is not in the host's network namespace.
	Pod      bool           `json:"pod"`
	Original netip.AddrPort `json:"original,omitzero"`
	// Workload is for people; the four after it for programs.
	Workload    string  `json:"workload,omitempty"`
	Unit        string  `json:"unit,omitempty"`
	PodUID      string  `json:"podUID,omitempty"`
	ContainerID string  `json:"containerID,omitempty"`
	Cgroup      string  `json:"cgroup,omitempty"`
	UID         *uint32 `json:"uid,omitempty"`
	// PID is in the initial pid namespace. Command is what the process called
	// itself, and CommandLine how it was started, if it still lives.
	PID         uint32 `json:"pid,omitempty"`
	Command     string `json:"command,omitempty"`
	CommandLine string `json:"commandLine,omitempty"`
	// Sent are bytes from the client, Received those to it.
	Sent     uint64 `json:"sent"`
	Received uint64 `json:"received"`
	// Quiet is for how long no byte has passed.
	Quiet time.Duration `json:"quietNanoseconds"`
}

// ConnStatuses lists what is carried now, the oldest first. It may be called
// from any goroutine.
func (a *Agent) ConnStatuses() []ConnStatus {
	out := []ConnStatus{}
	phase, _, _ := a.role.get()
	for _, c := range a.conns.Snapshot() {
		traffic, live := c.Traffic()
		if !live {
			continue // it has ended since
		}
		t := c.Target
		s := ConnStatus{
			ID: t.ID, Target: t.Name, State: c.State(), Draining: phase == PhaseDraining, Since: c.Since,
			Client: t.Client, Pod: t.Pod, Original: t.Original,
			Workload: t.Workload, PID: t.PID, Command: t.Command,
			Sent: traffic.Sent, Received: traffic.Received, Quiet: traffic.Quiet,
		}
		if w := c.Client.Workload; c.Client.WorkloadKnown {
			s.Unit, s.PodUID, s.ContainerID, s.Cgroup = w.Unit, w.PodUID, w.ContainerID, w.Path
		}
		if t.UIDKnown {
			s.UID = &t.UID
		}
		if t.PID != 0 {
			s.CommandLine = workload.CommandLine(t.PID, c.Since)
		}
		out = append(out, s)
	}
	return out
}

// ConnCounts are how many connections are carried now, by how far they have come.
type ConnCounts struct {
	Open     int `json:"open"`
	Dialling int `json:"dialling"`
	Held     int `json:"held"`
}

func (a *Agent) connCounts() map[string]ConnCounts {
	out := map[string]ConnCounts{}
	for _, c := range a.conns.Snapshot() {
		n := out[c.Target.Name]
		switch c.State() {
		case intercept.ConnOpen:
			n.Open++
		case intercept.ConnDialling:
			n.Dialling++
		case intercept.ConnHeld:
			n.Held++
		}
		out[c.Target.Name] = n
	}
	return out
}
