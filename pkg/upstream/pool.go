package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// Defaults of Config.
const (
	// DefaultDialTimeout leaves time for a second address within the 5 s for
	// which an agent holds a connection.
	DefaultDialTimeout = 2 * time.Second
	// DefaultProbeEvery bounds how long an upstream that is back goes unused.
	DefaultProbeEvery = 500 * time.Millisecond
)

// Config describes a Pool.
type Config struct {
	// Name is the name of the target that the pool is behind.
	Name string
	// Addresses are "host:port", the nearest first; at least one.
	Addresses []string
	// DialTimeout bounds one attempt at one address; 0: DefaultDialTimeout.
	DialTimeout time.Duration
	// ProbeEvery is the pause between probes of an address that is down; 0:
	// DefaultProbeEvery.
	ProbeEvery time.Duration
	// Dialer dials the address in Target.Name; nil: dial.Direct.
	Dialer dial.Func
	Log    logrus.FieldLogger
	// Metrics may be nil.
	Metrics *Metrics
}

// Pool dials one of several equivalent addresses: the first in the order of
// the configuration that is believed up, and the next one if that fails. What
// it believes comes from use, and from probes of what is down. It never gives
// an address up for good: with all of them down, each is still tried. Safe for
// concurrent use.
type Pool struct {
	config  Config
	log     logrus.FieldLogger
	members []*member
	changed *broadcast

	mu sync.Mutex
	up int // members that are not down
}

// member is one address. Its fields but address and wake belong to Pool.mu.
type member struct {
	address string
	// wake tells the prober that the address went down.
	wake  chan struct{}
	down  bool
	since time.Time
}

// NewPool makes a pool whose addresses are all believed up.
func NewPool(c Config) (*Pool, error) { return newPool(c, newBroadcast()) }

func newPool(c Config, changed *broadcast) (*Pool, error) {
	if len(c.Addresses) == 0 {
		return nil, fmt.Errorf("upstream %q has no address", c.Name)
	}
	if c.DialTimeout == 0 {
		c.DialTimeout = DefaultDialTimeout
	}
	if c.ProbeEvery == 0 {
		c.ProbeEvery = DefaultProbeEvery
	}
	if c.Dialer == nil {
		c.Dialer = dial.Direct(&net.Dialer{})
	}
	p := &Pool{config: c, log: c.Log.WithField(observe.FieldTarget, c.Name), changed: changed, up: len(c.Addresses)}
	for _, a := range c.Addresses {
		p.members = append(p.members, &member{address: a, wake: make(chan struct{}, 1)})
		c.Metrics.setUp(c.Name, a, true)
	}
	return p, nil
}

// Dial is a dial.Func. It ignores the target's name. If every address fails,
// the error wraps dial.ErrNoUpstream, names each cause and lets errors.As find
// it; if a guard denied every one, it wraps dial.ErrDenied instead. It returns as soon as ctx ends.
func (p *Pool) Dial(ctx context.Context, t dial.Target) (dial.Conn, error) {
	tried := make([]bool, len(p.members))
	failure := &failure{name: p.config.Name}
	for {
		i, ok := p.choose(tried)
		if !ok {
			return nil, failure.err()
		}
		tried[i] = true
		m := p.members[i]
		c, err := p.attempt(ctx, m, t)
		switch {
		case err == nil:
			p.setDown(m, nil)
			return c, nil
		case ctx.Err() != nil:
			// Whoever asked gave up: that says nothing about the upstream.
			return nil, fmt.Errorf("upstream %s: %w", m.address, dial.Classify(ctx.Err()))
		case errors.Is(err, dial.ErrLimit):
			// Nor does our own shortage, which would fail at every address.
			return nil, fmt.Errorf("upstream %s: %w", m.address, err)
		}
		p.setDown(m, err)
		failure.causes = append(failure.causes, fmt.Errorf("%s: %w", m.address, err))
	}
}

// choose returns the first member not tried yet that is up, else the first not
// tried yet.
func (p *Pool) choose(tried []bool) (int, bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for i, m := range p.members {
		if !tried[i] && !m.down {
			return i, true
		}
	}
	i := slices.Index(tried, false)
	return i, i >= 0
}

// attempt dials one address within the time that one attempt has.
func (p *Pool) attempt(ctx context.Context, m *member, t dial.Target) (dial.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, p.config.DialTimeout)
	defer cancel()
	t.Name = m.address
	start := time.Now()
	c, err := p.config.Dialer(ctx, t)
	err = dial.Classify(err)
	p.config.Metrics.dialled(p.config.Name, m.address, err, time.Since(start))
	return c, err
}

// setDown records what an attempt at m showed; a nil cause means that it is up.
func (p *Pool) setDown(m *member, cause error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if m.down == (cause != nil) {
		return
	}
	wasUp := p.up > 0
	log := p.log.WithField(observe.FieldUpstream, m.address)
	if m.down = cause != nil; m.down {
		p.up--
		m.since = time.Now()
		select {
		case m.wake <- struct{}{}:
		default: // it is awake
		}
		log.WithError(cause).WithField(observe.FieldReason, result(cause)).Warn("upstream is down")
	} else {
		p.up++
		log.WithField("after", time.Since(m.since).Round(time.Millisecond).String()).Info("upstream is up again")
	}
	p.config.Metrics.setUp(p.config.Name, m.address, !m.down)
	if wasUp != (p.up > 0) {
		p.changed.send()
	}
}

// Up reports whether some address is believed up.
func (p *Pool) Up() bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.up > 0
}

// Changed returns a channel that is closed when Up may have changed. Take it
// before asking Up, and a new one each time.
func (p *Pool) Changed() <-chan struct{} { return p.changed.next() }
