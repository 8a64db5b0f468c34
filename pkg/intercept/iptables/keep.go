package iptables

import (
	"context"
	"runtime"
	"time"

	"github.com/vishvananda/netns"

	"github.com/kasway/kasway/pkg/rules"
)

// keepInterval is how often the rules are looked after. kube-proxy and others
// put their jumps first when they start; until ours are back in front, connects
// to a service address are refused by our guard.
const keepInterval = 3 * time.Second

// beginKeeping starts the keeper, in the namespace of the calling thread.
func (m *Mode) beginKeeping() error {
	if len(m.stop) > 1 {
		return nil
	}
	here, err := netns.Get()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		defer here.Close()
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := netns.Set(here); err != nil {
			m.cfg.Log.WithError(err).Error("iptables: the rules are not looked after")
			return
		}
		m.keep(ctx)
	}()
	m.stop = append(m.stop, func() { cancel(); <-done })
	return nil
}

func (m *Mode) keep(ctx context.Context) {
	tick := time.NewTicker(keepInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			m.cfg.Metrics.failures.Inc()
			m.cfg.Log.WithError(err).Error("iptables: looking after the rules")
		}
	}
}

// look puts back whatever is not as it was installed, and sweeps away what was
// alive, or seemed so, at the last Apply.
func (m *Mode) look(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, f := range m.want.Families {
		if err := m.mend(ctx, f); err != nil {
			return err
		}
	}
	names, err := m.kernel.names()
	if err != nil || len(names) == len(m.want.Sets) {
		return err
	}
	return m.sweep(ctx)
}

func (m *Mode) mend(ctx context.Context, f rules.IPTablesFamily) error {
	t := m.tool(f.V6)
	intact, err := t.intact(f)
	if err != nil || intact {
		return err
	}
	m.cfg.Metrics.repairs.Inc()
	m.cfg.Log.Warnf("iptables: somebody has moved or removed our rules in %s, putting them back in front", t.name)
	return t.install(ctx, f)
}
