package upstream

import (
	"context"
	"fmt"
	"sync"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// Set is the pools of one server by name. It does not change once made; safe
// for concurrent use.
type Set struct {
	pools   map[string]*Pool
	changed *broadcast
}

// NewSet makes a pool of each configuration. Names are unique.
func NewSet(configs []Config) (*Set, error) {
	s := &Set{pools: map[string]*Pool{}, changed: newBroadcast()}
	for _, c := range configs {
		if s.pools[c.Name] != nil {
			return nil, fmt.Errorf("two upstreams are called %q", c.Name)
		}
		p, err := newPool(c, s.changed)
		if err != nil {
			return nil, err
		}
		s.pools[c.Name] = p
	}
	return s, nil
}

// Dial is a dial.Func: it dials from the pool that has the target's name.
func (s *Set) Dial(ctx context.Context, t dial.Target) (dial.Conn, error) {
	p := s.pools[t.Name]
	if p == nil {
		return nil, fmt.Errorf(`%w: none is called "%s"`, dial.ErrNoUpstream, observe.Text(t.Name))
	}
	return p.Dial(ctx, t)
}

// Up returns, for each name, whether some address is believed up.
func (s *Set) Up() map[string]bool {
	up := make(map[string]bool, len(s.pools))
	for name, p := range s.pools {
		up[name] = p.Up()
	}
	return up
}

// Changed returns a channel that is closed when Up may have changed. Take it
// before asking Up, and a new one each time.
func (s *Set) Changed() <-chan struct{} { return s.changed.next() }

// Run probes what is down until ctx ends.
func (s *Set) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, p := range s.pools {
		wg.Go(func() { p.Run(ctx) })
	}
	wg.Wait()
}

// broadcast wakes everybody who waits for something to change.
type broadcast struct {
	mu sync.Mutex
	ch chan struct{}
}

func newBroadcast() *broadcast { return &broadcast{ch: make(chan struct{})} }

func (b *broadcast) next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.ch
}

func (b *broadcast) send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	close(b.ch)
	b.ch = make(chan struct{})
}
