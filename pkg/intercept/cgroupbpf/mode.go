package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Config is what a Mode needs of its surroundings; the zero value works.
type Config struct {
	// Cgroup is Auto, or the directory of a cgroup below which alone is diverted;
	// "" means Auto.
	Cgroup string
	// PinDir is where programs are pinned; "" means DefaultPinDir.
	PinDir string
	// Own are the agent's own sockets, exempt by their cookies as well as by the
	// mark; may be nil.
	Own *intercept.OwnSockets
	// Log may be nil.
	Log logrus.FieldLogger
	// Metrics and Heartbeat may be nil.
	Metrics   *Metrics
	Heartbeat *intercept.Metrics
}

func (c Config) withDefaults() Config {
	if c.Cgroup == "" {
		c.Cgroup = Auto
	}
	if c.PinDir == "" {
		c.PinDir = DefaultPinDir
	}
	if c.Log == nil {
		l := logrus.New()
		l.SetOutput(io.Discard)
		c.Log = l
	}
	if c.Metrics == nil {
		c.Metrics = NewMetrics(nil)
	}
	return c
}

// Mode implements intercept.Mode and intercept.Attributor with programs on the
// hooks of a cgroup. Pods are told from the host by the network namespace of the
// thread that calls the first Apply.
type Mode struct {
	cfg Config

	mu        sync.Mutex
	installed *installed
	stop      func() // ends the heartbeat; nil: not diverting
	unwatch   func()

	pulse  sync.Mutex // never held for long, as mu is: Apply may wait for other processes
	beater *installed // whose heartbeat is renewed; nil: nobody's

	whose sync.RWMutex
	flows *flows // of the last installation; they outlive Close, as connections do
}

var (
	_ intercept.Mode       = (*Mode)(nil)
	_ intercept.Attributor = (*Mode)(nil)
)

// New makes a Mode that has installed nothing yet.
func New(cfg Config) *Mode { return &Mode{cfg: cfg.withDefaults()} }

// Name is the mode's name in the configuration.
func (m *Mode) Name() string { return "ebpf" }

// Apply implements intercept.Mode. A connect sees all of the former state or all
// of this one. A failed Apply leaves what was in force.
func (m *Mode) Apply(ctx context.Context, s rules.State) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("ebpf: applying: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.install(s); err != nil {
		return fmt.Errorf("ebpf: applying: %w", err)
	}
	if m.stop == nil {
		m.stop = intercept.StartHeartbeat(intercept.HeartbeatInterval, m.beat, m.cfg.Log, m.cfg.Heartbeat)
	}
	return nil
}

// install loads programs if there are none, gives them s, and then sees that they
// are what the hooks run.
func (m *Mode) install(s rules.State) (err error) {
	in := m.installed
	if in != nil && !in.root.there() {
		m.cfg.Log.WithField("cgroup", in.root.Path).Warn("ebpf: the cgroup that the programs were attached to is gone: attaching anew")
		m.installed = nil
		m.forget()
		if err := in.close(); err != nil {
			return err
		}
		in = nil
	}
	if in != nil {
		// What fails must do so before anything has changed.
		if err := in.hook(); err != nil {
			return err
		}
		err = in.set(s)
	} else if in, err = m.first(s); err == nil {
		m.installed = in
	}
	if err != nil {
		return err
	}
	m.cfg.Metrics.name(s)
	m.interrupt(s)
	return nil
}

// interrupt makes clients of the host come again that dialled before a program
// was there to see it.
func (m *Mode) interrupt(s rules.State) {
	first := m.installed.fresh
	m.installed.fresh = false
	if !first || !s.Clients.Host {
		return
	}
	switch n, err := intercept.Interrupt(s); {
	case err != nil:
		m.cfg.Log.WithError(err).Warn("ebpf: who dialled before the agent came is not diverted until it dials again")
	case n > 0:
		m.cfg.Log.WithField("connects", n).Info("ebpf: interrupted connects from before the agent came, for their clients to dial again")
	}
}

// first makes an installation that diverts by s, or leaves none.
func (m *Mode) first(s rules.State) (*installed, error) {
	in, err := m.load()
	if err != nil {
		return nil, err
	}
	if err = in.set(s); err == nil {
		err = in.hook()
	}
	m.beats(in)
	if err != nil {
		m.forget()
		return nil, errors.Join(err, in.undo(), in.close())
	}
	return in, nil
}

// load makes an installation that is attached nowhere yet.
func (m *Mode) load() (*installed, error) {
	root, err := FindRoot(m.cfg.Cgroup)
	if err != nil {
		return nil, err
	}
	fs, err := FindBPFFS(m.cfg.PinDir)
	if err != nil {
		return nil, err
	}
	if err := fs.Ensure(); err != nil {
		return nil, err
	}
	netns, err := hostNamespace(root.Path)
	if err != nil {
		return nil, err
	}
	in, err := newInstalled(root, m.cfg.PinDir, netns)
	if err != nil {
		return nil, err
	}
	flows, err := in.flows()
	if err != nil {
		return nil, errors.Join(err, in.close())
	}
	m.know(flows)
	m.cfg.Metrics.read(in.objects.KwCounts)
	if m.cfg.Own != nil {
		m.unwatch = m.cfg.Own.Watch(in.exempt)
	}
	return in, nil
}

// know replaces what Attribute looks at.
func (m *Mode) know(f *flows) {
	m.whose.Lock()
	defer m.whose.Unlock()
	if old := m.flows; old != nil {
		_, _ = old.host.Close(), old.pods.Close() // only read from
	}
	m.flows = f
}

// forget ends what load has begun.
func (m *Mode) forget() {
	m.beats(nil)
	m.cfg.Metrics.read(nil)
	if m.unwatch != nil {
		m.unwatch()
		m.unwatch = nil
	}
}

// beats says whose heartbeat is renewed from now on.
func (m *Mode) beats(in *installed) {
	m.pulse.Lock()
	defer m.pulse.Unlock()
	m.beater = in
}

// beat renews the heartbeat of what is installed.
func (m *Mode) beat() error {
	m.pulse.Lock()
	defer m.pulse.Unlock()
	if m.beater == nil {
		return nil
	}
	return m.beater.beat()
}

// Close implements intercept.Mode. Where WhenDown is Refuse, connects are refused
// from now on by what stays pinned. Of another agent that has taken over nothing
// is touched. A second Close does nothing; Apply may follow.
func (m *Mode) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop == nil {
		return nil
	}
	m.stop() // a last beat does not wait for the lock
	m.stop = nil
	in := m.installed
	m.installed = nil
	m.forget()
	if in == nil {
		return nil // its cgroup has gone, and no other was found
	}
	if err := errors.Join(in.unhook(), in.close()); err != nil {
		return fmt.Errorf("ebpf: closing: %w", err)
	}
	return nil
}

// Detail says where the programs are attached, for status.
func (m *Mode) Detail() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.installed == nil {
		return nil
	}
	return []string{"attached to " + m.installed.root.String() + ", pinned to " + m.installed.dir}
}
