package intercept

import (
	"net/netip"
	"sync/atomic"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/workload"
)

// WhoConfig is what a Who asks.
type WhoConfig struct {
	// Sockets knows the host's own clients; nil: only the mode does, if any.
	Sockets *Sockets
	// Workloads finds what runs in a cgroup; nil: nobody knows.
	Workloads *workload.Index
	Metrics   *Metrics
}

// Who finds out who connected, from what the mode kept of the connect, or else,
// for the host's own clients, from their sockets. It never decides where a
// connection goes. It is safe for concurrent use.
type Who struct {
	cfg  WhoConfig
	mode atomic.Pointer[Attributor]
}

// NewWho makes a Who.
func NewWho(cfg WhoConfig) *Who {
	cfg.Metrics = orUnregistered(cfg.Metrics)
	return &Who{cfg: cfg}
}

// Close gives back the Sockets.
func (w *Who) Close() {
	if w.cfg.Sockets != nil {
		_ = w.cfg.Sockets.Close() // whoever asks it now is told that nobody knows
	}
}

// SetMode says which mode diverts; it may be an Attributor. Call it before the
// mode's first Apply, or the first connections are of unknown clients.
func (w *Who) SetMode(m Mode) {
	a, ok := m.(Attributor)
	if !ok {
		w.mode.Store(nil)
		return
	}
	w.mode.Store(&a)
}

// Client is who made a connection; see Attribution for what it holds.
type Client struct {
	Attribution
	// Workload is what runs in the client's cgroup, if WorkloadKnown.
	Workload      workload.Workload
	WorkloadKnown bool
	// host: it is in the host's network namespace.
	host bool
}

// describe puts what is known into t.
func (c *Client) describe(t *dial.Target) {
	t.Original, t.UID, t.UIDKnown = c.Original, c.UID, c.UIDKnown
	t.PID, t.Command = c.PID, c.Command
	if !c.WorkloadKnown {
		return
	}
	t.Workload = c.Workload.String()
	if c.host {
		t.Unit, t.UnitKnown = c.Workload.Unit, true
	}
}

// find looks t's client up, and counts it if nothing could be found that should
// be known. An error is about the original destination alone.
func (w *Who) find(t Taken) (Client, error) {
	c := Client{host: t.FromHost}
	var (
		err   error
		known bool
	)
	mode := w.mode.Load()
	if t.FromHost && t.Side == PodSide {
		// What the mode keeps of that side comes from pods' namespaces too, and a
		// pod may give itself an address of the host.
		mode = nil
	}
	if mode != nil {
		if c.Attribution, known = (*mode).Attribute(t); !known {
			c.Attribution = Attribution{}
		}
	}
	if t.Transparent {
		c.Original = t.Local
	}
	if !c.Original.IsValid() {
		c.Original, err = Original(t.Conn)
		if mode != nil && c.Original == t.Local {
			c.Original = netip.AddrPort{} // it was rewritten before any tracking
		}
	}
	if !known && t.FromHost && w.cfg.Sockets != nil {
		var o Owner
		if o, known = w.owner(t, c.Original); known {
			c.UID, c.UIDKnown, c.CgroupID = o.UID, true, o.CgroupID
		}
	}
	if c.CgroupID != 0 && w.cfg.Workloads != nil {
		c.Workload, c.WorkloadKnown = w.cfg.Workloads.Find(c.CgroupID)
	}
	asked := mode != nil || t.FromHost && w.cfg.Sockets != nil
	if asked && (!known || w.cfg.Workloads != nil && !c.WorkloadKnown) {
		w.cfg.Metrics.lost.Inc()
	}
	return c, err
}

// owner looks for the client's socket by the address it dialled. That is the
// listener's own where nothing was rewritten, or already at the connect.
func (w *Who) owner(t Taken, original netip.AddrPort) (Owner, bool) {
	if o, known := w.cfg.Sockets.Owner(t.Peer, original); known {
		return o, true
	}
	return w.cfg.Sockets.Owner(t.Peer, t.Local)
}
