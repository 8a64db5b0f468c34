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
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Config is what a Mode needs of its surroundings; the zero value works.
type Config struct {
	// Log may be nil.
	Log logrus.FieldLogger
	// Heartbeat may be nil.
	Heartbeat *intercept.Metrics
	// Plan is for a mode that installs other rules; nil: rules.RenderIPTables.
	// Lingers then says which chains stay when it is closed, for the connections
	// taken; the next agent sweeps them away.
	Plan    func(rules.State) rules.IPTables
	Lingers func(chain, generation string) bool
}

// Mode implements intercept.Mode with iptables, in the network namespace of
// the thread that calls its first Apply.
type Mode struct {
	cfg Config
	run runner

	mu sync.Mutex
	// back is the back end in use, once chosen, with its tools.
	back       backEnd
	tools      tools
	want       rules.IPTables
	left       []standing // of each family, as the last Apply has left it
	rivals     []rival    // that were there at the first Apply
	generation string

	kernel sets
	renew  atomic.Pointer[[]rules.IPSet] // what a beat renews
	stop   func()                        // ends the heartbeat; nil: not applied

	beating sync.Mutex // never waited for long
	beaten  time.Time  // when the last beat was
	emptied []string   // sets of ours that somebody has emptied since the last Verify
}

var _ intercept.Mode = (*Mode)(nil)

// New makes a Mode that has installed nothing yet.
func New(cfg Config) *Mode {
	if cfg.Log == nil {
		l := logrus.New()
		l.SetOutput(io.Discard)
		cfg.Log = l
	}
	if cfg.Plan == nil {
		cfg.Plan = rules.RenderIPTables
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

func (m *Mode) apply(ctx context.Context, s rules.State) error {
	if err := m.settle(ctx); err != nil {
		return err
	}
	if m.kernel.Handle == nil {
		kernel, err := openSets()
		if err != nil {
			return err
		}
		m.kernel = kernel
	}
	want := m.cfg.Plan(s)
	for _, f := range want.Families {
		if f.V6 && m.tools.v6 == nil {
			return fmt.Errorf("%w: targets with IPv6 addresses need %s", intercept.ErrNotSupported, toolName(m.back, true))
		}
	}
	m.generation = s.Generation
	first := m.stop == nil
	if err := m.beginBeating(want.Sets); err != nil {
		return err
	}
	if err := m.tools.install(ctx, want); err != nil {
		return err
	}
	left, err := m.tools.leave(ctx, want)
	if err != nil {
		return err
	}
	dead, err := m.deadSets()
	if err != nil {
		return err
	}
	if first {
		if n, err := intercept.ForgetClosed(s); n > 0 || err != nil {
			m.cfg.Log.WithField("forgotten", n).WithError(err).Debug("iptables: closed connections of an agent that has died")
		}
	}
	before := m.want
	m.want, m.left = want, left
	// Sweeping reads all rules of everybody, which can take a second.
	if len(dead) > 0 || !slices.Equal(names(before), names(want)) {
		if err := m.sweep(ctx); err != nil {
			m.want, m.left = before, nil // so that the next Apply sweeps again
			return fmt.Errorf("removing what is left of earlier states: %w", err)
		}
	}
	return nil
}

// settle chooses the back end, or moves to the other one after kube-proxy.
func (m *Mode) settle(ctx context.Context) error {
	if m.back == "" {
		return m.choose(ctx)
	}
	to, err := m.elsewhere()
	switch {
	case errors.Is(err, intercept.ErrNotSupported):
		return nil // Verify tells of it; what can be done here still is
	case err != nil || to == nil:
		return err
	}
	m.cfg.Log.Warnf("iptables: kube-proxy uses the %s back end, moving there", to.back)
	// Nothing stands there yet, and what stands here is to be swept away.
	m.back, m.tools, m.want, m.left = to.back, to.tools, rules.IPTables{}, nil
	return nil
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
	if m.stop == nil {
		m.rivals, m.beaten = rivals(), time.Now()
		m.stop = intercept.StartHeartbeat(intercept.HeartbeatInterval, m.beat, m.cfg.Log, m.cfg.Heartbeat)
	}
	return nil
}

// beat takes no lock that is held for long: an iptables command may hold m.mu
// for seconds.
func (m *Mode) beat() error {
	m.beating.Lock()
	defer m.beating.Unlock()
	var errs []error
	for _, s := range *m.renew.Load() {
		empty, err := m.emptiedNow(s)
		if err == nil {
			err = m.kernel.renew(s)
		}
		if err == nil && empty && !slices.Contains(m.emptied, s.Name) {
			m.emptied = append(m.emptied, s.Name)
		}
		errs = append(errs, err)
	}
	m.beaten = time.Now()
	return errors.Join(errs...)
}

// emptiedNow says whether somebody has emptied a set: it was renewed a moment
// ago, and holds nothing.
func (m *Mode) emptiedNow(s rules.IPSet) (bool, error) {
	if time.Since(m.beaten) > time.Duration(s.Timeout)*time.Second/2 {
		return false, nil // this process did not run: it may have lapsed
	}
	in, err := m.kernel.alive(s.Name)
	return !in, err
}

// Close implements intercept.Mode. A second Close does nothing; Apply may
// follow.
func (m *Mode) Close() error {
	m.mu.Lock()
	stop := m.stop
	m.stop = nil
	m.mu.Unlock()
	if stop != nil {
		stop()
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.generation == "" {
		return nil
	}
	// The guard's chain is of no generation, and stays.
	err := m.removeOwn(context.Background(), func(chain, generation string) bool {
		return generation == m.generation && (m.cfg.Lingers == nil || !m.cfg.Lingers(chain, generation))
	})
	m.kernel.Close()
	m.kernel, m.want, m.left, m.generation = sets{}, rules.IPTables{}, nil, ""
	if err != nil {
		return fmt.Errorf("iptables: closing: %w", err)
	}
	return nil
}
