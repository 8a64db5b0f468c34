package nft

import (
	"context"
	"errors"
	"fmt"
	"io"
	"slices"
	"sync"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Config is what a Mode and a ListenGuard need of their surroundings; the zero
// value works.
type Config struct {
	// Log may be nil.
	Log logrus.FieldLogger
	// Heartbeat may be nil.
	Heartbeat *intercept.Metrics
	// Plan is for a mode that installs other tables: that of the generation, and
	// with Refuse the guard; nil: rules.PlanNFT. Linger is then what takes the
	// place of the generation's table when it is closed, until the process ends.
	Plan   func(rules.State) []rules.NFTTable
	Linger func(rules.State) rules.NFTTable
}

func (c Config) withDefaults() Config {
	if c.Log == nil {
		l := logrus.New()
		l.SetOutput(io.Discard)
		c.Log = l
	}
	if c.Plan == nil {
		c.Plan = rules.PlanNFT
	}
	return c
}

// Mode implements intercept.Mode with nftables, in the network namespace of
// the thread that calls its first Apply.
type Mode struct {
	cfg Config

	mu   sync.Mutex // the heartbeat works beside the caller
	sock *socket    // nil: not applied
	plan []rules.NFTTable
	left footprint // what the last Apply has left in the kernel
	last rules.State
	stop func() // ends the heartbeat; nil: not diverting

	// beating is held for as long as a datagram takes to send. Never is mu: an
	// Apply may wait for the transactions of others while it holds that.
	beating sync.Mutex
	pulse   *pulse // nil: not diverting
}

var _ intercept.Mode = (*Mode)(nil)

// New makes a Mode that has installed nothing yet.
func New(cfg Config) *Mode { return &Mode{cfg: cfg.withDefaults()} }

// Name is the mode's name in the configuration.
func (m *Mode) Name() string { return "nft" }

// Apply implements intercept.Mode. A failed Apply leaves what was in force.
func (m *Mode) Apply(ctx context.Context, s rules.State) error {
	if err := ctx.Err(); err != nil {
		return fmt.Errorf("nft: applying: %w", err)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	// The mark may have changed, and with it the heartbeat.
	p, err := openPulse(rules.NFTBeat(s.Generation), s.Mark)
	if err != nil {
		return fmt.Errorf("nft: applying: %w", err)
	}
	if err := m.install(m.cfg.Plan(s)); err != nil {
		_ = p.close() // nothing was sent
		return fmt.Errorf("nft: applying: %w", err)
	}
	m.beatBy(p)
	m.last = s
	if m.stop == nil {
		m.stop = intercept.StartHeartbeat(intercept.HeartbeatInterval, m.beat, m.cfg.Log, m.cfg.Heartbeat)
		if n, err := intercept.ForgetClosed(s); n > 0 || err != nil {
			m.cfg.Log.WithField("forgotten", n).WithError(err).Debug("nft: closed connections of an agent that has died")
		}
	}
	return nil
}

// beatBy replaces the pulse.
func (m *Mode) beatBy(p *pulse) {
	m.beating.Lock()
	defer m.beating.Unlock()
	if m.pulse != nil {
		_ = m.pulse.close() // a datagram socket has nothing to lose
	}
	m.pulse = p
}

func (m *Mode) install(plan []rules.NFTTable) error {
	if m.sock != nil && !m.sock.isClosed() {
		lingering.remove(m.sock)
		return m.replace(plan)
	}
	sock, err := openSocket()
	if err != nil {
		return err
	}
	m.sock, m.plan, m.left = sock, nil, footprint{}
	if err := m.rebuild(plan); err != nil {
		m.sock = nil
		_ = sock.close() // nothing was made over it
		return err
	}
	return nil
}

// replace swaps the rules within their chains where that is enough: where the
// chains are those of the plan, and nobody has touched them.
func (m *Mode) replace(plan []rules.NFTTable) error {
	if !slices.EqualFunc(m.plan, plan, sameShape) || len(m.left.tables) != len(plan) {
		return m.rebuild(plan)
	}
	now, err := m.sock.look(m.plan)
	if err != nil {
		return err
	}
	var b batch
	for i, t := range plan {
		if len(m.left.tables[i].differences(t.Name, now.tables[i])) == 0 {
			b.refill(t)
		} else {
			b.rebuild(t)
		}
	}
	if err := m.sock.commit(&b); err != nil {
		return err
	}
	return m.installed(plan)
}

// installed notes what the kernel holds now.
func (m *Mode) installed(plan []rules.NFTTable) (err error) {
	m.plan = plan
	m.left, err = m.sock.leave(plan)
	return err
}

// rebuild replaces the tables themselves, and removes those that a crash on a
// kernel or by a tool without owned tables has left.
func (m *Mode) rebuild(plan []rules.NFTTable) error {
	var b batch
	tables, err := m.sock.tables()
	if err != nil {
		return err
	}
	for _, t := range tables {
		mine := t.owned && len(m.plan) > 0 && t.name == m.plan[0].Name
		if t.ours() && t.name != rules.NFTGuard && (mine || !t.owned) {
			b.deleteTable(t.family, t.name)
		}
	}
	for _, t := range plan {
		b.rebuild(t)
	}
	if len(plan) == 1 {
		b.removeTable(rules.NFTTable{Name: rules.NFTGuard})
	}
	if err := m.sock.commit(&b); err != nil {
		return err
	}
	return m.installed(plan)
}

// sameShape tells whether two tables differ in their rules at most.
func sameShape(a, b rules.NFTTable) bool {
	return a.Name == b.Name && a.Owner == b.Owner && a.Alive == b.Alive &&
		slices.EqualFunc(a.Chains, b.Chains, func(c, d rules.NFTChain) bool {
			return c.Name == d.Name && c.Type == d.Type && c.Hook == d.Hook && c.Priority == d.Priority
		})
}

// beat renews the set. It takes no lock that an Apply holds.
func (m *Mode) beat() error {
	m.beating.Lock()
	defer m.beating.Unlock()
	return m.pulse.send()
}

// Close implements intercept.Mode. A second Close does nothing; Apply may
// follow.
func (m *Mode) Close() error {
	m.mu.Lock()
	stop := m.stop
	m.stop = nil
	m.mu.Unlock()
	if stop == nil {
		return nil
	}
	stop() // outside the lock, which the last beat needs
	m.mu.Lock()
	defer m.mu.Unlock()
	_ = m.pulse.close()
	m.pulse = nil
	if m.cfg.Linger != nil {
		return m.linger(m.cfg.Linger(m.last))
	}
	if len(m.plan) == 1 {
		return m.linger(rules.PlanNFTLinger(m.last.Generation))
	}
	sock := m.sock
	m.sock = nil
	if err := sock.close(); err != nil {
		return fmt.Errorf("nft: closing: %w", err)
	}
	return nil
}

// linger leaves but what the connections taken need, such as the kernel's nat
// where no guard keeps it at work. It ends with the process, or by Cleanup.
func (m *Mode) linger(t rules.NFTTable) error {
	var b batch
	if sameShape(m.plan[0], t) {
		b.refill(t) // without a moment in which a packet meets neither
	} else {
		b.rebuild(t)
	}
	if err := m.sock.commit(&b); err != nil {
		return fmt.Errorf("nft: closing: %w", err)
	}
	m.plan, m.left = []rules.NFTTable{t}, footprint{}
	lingering.add(m.sock)
	return nil
}

// lingering are the sockets of this process that closed Modes have left open.
var lingering sockets

type sockets struct {
	mu  sync.Mutex
	all []*socket
}

func (s *sockets) add(one *socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, one)
}

func (s *sockets) remove(one *socket) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = slices.DeleteFunc(s.all, func(other *socket) bool { return other == one })
}

// close closes and forgets them all.
func (s *sockets) close() (err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.all {
		err = errors.Join(err, one.close())
	}
	s.all = nil
	return err
}
