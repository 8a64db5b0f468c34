package iptables

import (
	"context"
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Config is what a Mode needs of its surroundings; the zero value works.
type Config struct {
	// Log may be nil.
	Log logrus.FieldLogger
	// Metrics and Heartbeat may be nil.
	Metrics   *Metrics
	Heartbeat *intercept.Metrics
}

// Mode implements intercept.Mode with iptables, in the network namespace of
// the thread that calls its first Apply.
type Mode struct {
	cfg Config
	run runner

	mu sync.Mutex // the keeper works beside the caller
	// back is the back end in use, once chosen, with its tools.
	back       backEnd
	tools      tools
	want       rules.IPTables
	generation string

	kernel sets
	renew  atomic.Pointer[[]rules.IPSet] // what a beat renews
	stop   []func()                      // heartbeat and keeper; nil: not applied
}

var _ intercept.Mode = (*Mode)(nil)

// New makes a Mode that has installed nothing yet.
func New(cfg Config) *Mode {
	if cfg.Log == nil {
		l := logrus.New()
		l.SetOutput(io.Discard)
		cfg.Log = l
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	return &Mode{cfg: cfg, run: run}
}

// Name is the mode's name in the configuration.
func (m *Mode) Name() string { return "iptables" }

var generations = regexp.MustCompile(`^[a-z0-9]{1,15}$`)

// Apply implements intercept.Mode. If it fails, what was in force before stays
// so in every table that was not reached; Apply may be called again.
func (m *Mode) Apply(ctx context.Context, s rules.State) error {
	switch {
	case !generations.MatchString(s.Generation):
		return fmt.Errorf("iptables: generation %q: want 1 to 15 of a-z and 0-9", s.Generation)
	case s.Mark&s.MarkMask == 0:
		return fmt.Errorf("iptables: mark %#x/%#x would exempt every socket", s.Mark, s.MarkMask)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.generation != "" && m.generation != s.Generation {
		return fmt.Errorf("iptables: generation %s cannot become %s while it is applied", m.generation, s.Generation)
	}
	if err := m.apply(ctx, s); err != nil {
		return fmt.Errorf("iptables: applying: %w", err)
	}
	return nil
}

func (m *Mode) apply(ctx context.Context, s rules.State) (err error) {
	if m.back == "" {
		if err := m.choose(ctx); err != nil {
			return err
		}
	}
	if m.kernel.Handle == nil {
		if m.kernel, err = openSets(); err != nil {
			return err
		}
	}
	want := rules.RenderIPTables(s)
	for _, f := range want.Families {
		if f.V6 && m.tools.v6 == nil {
			return fmt.Errorf("%w: targets with IPv6 addresses need %s", intercept.ErrNotSupported, toolName(m.back, true))
		}
	}
	m.generation = s.Generation
	if err := m.beginBeating(want.Sets); err != nil {
		return err
	}
	if err := m.tools.install(ctx, want); err != nil {
		return err
	}
	before := m.want
	m.want = want
	// Sweeping reads all rules of everybody, which can take a second; later the
	// keeper sweeps away what other generations leave.
	if !slices.Equal(names(before), names(want)) {
		if err := m.sweep(ctx); err != nil {
			m.want = before // so that the next Apply sweeps again
			return fmt.Errorf("removing what is left of earlier states: %w", err)
		}
	}
	return m.beginKeeping()
}

// names lists the chains of ours, with family and table.
func names(t rules.IPTables) (all []string) {
	for _, f := range t.Families {
		for _, table := range f.Tables {
			for _, c := range table.Chains {
				all = append(all, fmt.Sprint(f.V6, table.Name, c.Name))
			}
		}
	}
	return all
}

// beginBeating makes the alive sets, which the rules will refer to, and keeps
// them alive from then on.
func (m *Mode) beginBeating(want []rules.IPSet) error {
	for _, s := range want {
		if err := m.kernel.fill(s); err != nil {
			return err
		}
	}
	m.renew.Store(&want)
	if len(m.stop) == 0 {
		m.stop = append(m.stop, intercept.StartHeartbeat(intercept.HeartbeatInterval, m.beat, m.cfg.Log, m.cfg.Heartbeat))
	}
	return nil
}

// beat takes no lock: an iptables command may hold m.mu for seconds. A set that
// somebody has destroyed is made again: without it the keeper could not put
// back the rules either, which refer to it.
func (m *Mode) beat() error {
	var errs []error
	for _, s := range *m.renew.Load() {
		err := m.kernel.renew(s)
		if errors.Is(err, unix.ENOENT) {
			m.cfg.Metrics.repairs.Inc()
			m.cfg.Log.Warnf("iptables: somebody has destroyed the ipset %s, making it again", s.Name)
			err = m.kernel.fill(s)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// Close implements intercept.Mode. A second Close does nothing; Apply may
// follow.
func (m *Mode) Close() error {
	m.mu.Lock()
	stop := m.stop
	m.stop = nil
	m.mu.Unlock()
	for i := len(stop) - 1; i >= 0; i-- {
		stop[i]() // outside the lock, which the keeper needs
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.generation == "" {
		return nil
	}
	// The guard's chain is of no generation, and stays.
	err := m.removeOwn(context.Background(), func(chain, generation string) bool { return generation == m.generation })
	m.kernel.Close()
	m.kernel, m.want, m.generation = sets{}, rules.IPTables{}, ""
	if err != nil {
		return fmt.Errorf("iptables: closing: %w", err)
	}
	return nil
}
