package upstream

import (
	"context"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// Run probes addresses that are down until they are up again, and returns when
// ctx has ended and no probe is left. What is up is not probed: its users
// notice first.
func (p *Pool) Run(ctx context.Context) {
	var wg sync.WaitGroup
	for _, m := range p.members {
		wg.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case <-m.wake:
					p.probe(ctx, m)
				}
			}
		})
	}
	wg.Wait()
}

// probe connects to m until that succeeds, or somebody's dial did.
func (p *Pool) probe(ctx context.Context, m *member) {
	pause := time.NewTicker(p.config.ProbeEvery)
	defer pause.Stop()
	for p.isDown(m) {
		c, err := p.attempt(ctx, m, dial.Target{ID: "probe"})
		if err == nil {
			_ = c.Close()
			p.setDown(m, nil)
			return
		}
		p.log.WithError(err).WithField(observe.FieldUpstream, m.address).Debug("upstream is still down")
		select {
		case <-ctx.Done():
			return
		case <-pause.C:
		}
	}
}

func (p *Pool) isDown(m *member) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return m.down
}
