package iptables

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	"github.com/vishvananda/netns"

	"github.com/kasway/kasway/pkg/rules"
)

// keepInterval is how often the rules are looked after. kube-proxy and others
// put their jumps first when they start; until ours are back in front, connects
// to a service address are refused by our guard. Where looking takes long, for
// the many rules of others, it is done less often: it may use 5 % of a core.
const (
	keepInterval = 3 * time.Second
	keepShare    = 20
)

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
		defer func() { _ = here.Close() }()
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine
		if err := enter(here); err != nil {
			m.cfg.Log.WithError(err).Error("iptables: the rules are not looked after")
			return
		}
		m.keep(ctx)
	}()
	m.stop = append(m.stop, func() { cancel(); <-done })
	return nil
}

// enter moves the calling thread into ns. In the agent it is there already, and
// must not try: that would take CAP_SYS_ADMIN.
func enter(ns netns.NsHandle) error {
	now, err := netns.Get()
	if err != nil {
		return err
	}
	defer func() { _ = now.Close() }()
	if now.Equal(ns) {
		return nil
	}
	return netns.Set(ns)
}

func (m *Mode) keep(ctx context.Context) {
	next := time.NewTimer(keepInterval)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		begun := time.Now()
		if err := m.look(ctx); err != nil && ctx.Err() == nil {
			m.cfg.Metrics.failures.Inc()
			m.cfg.Log.WithError(err).Error("iptables: looking after the rules")
		}
		next.Reset(max(keepInterval, keepShare*time.Since(begun)))
	}
}

// look puts back whatever is not as it was installed, and sweeps away what was
// alive, or seemed so, at the last Apply.
func (m *Mode) look(ctx context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if err := m.follow(ctx); err != nil {
		return err
	}
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
	t := m.tools.of(f.V6)
	intact, err := t.intact(f)
	if err != nil || intact {
		return err
	}
	m.cfg.Metrics.repairs.Inc()
	m.cfg.Log.Warnf("iptables: somebody has moved or removed our rules in %s, putting them back in front", t.name)
	return t.install(ctx, f)
}

// follow moves to the other back end if kube-proxy has started to use that one
// since the choice was made, as when both start with the node. Its nat hook may
// come before that of the back end in use, and then takes service addresses
// away from us.
func (m *Mode) follow(ctx context.Context) error {
	here, err := m.tools.servesKube()
	if err != nil || here {
		return err
	}
	to := other(m.back)
	if to == legacy && !legacyTable("nat") {
		return nil // which looking would make
	}
	there, err := findTools(to, m.run)
	if errors.Is(err, exec.ErrNotFound) {
		return nil
	}
	if err != nil {
		return err
	}
	if serves, err := there.servesKube(); err != nil || !serves {
		return err
	}
	if there.v6 == nil && m.tools.v6 != nil {
		return fmt.Errorf("kube-proxy uses the %s back end, and %s is not installed", to, toolName(to, true))
	}
	m.cfg.Metrics.repairs.Inc()
	m.cfg.Log.Warnf("iptables: kube-proxy uses the %s back end, moving there", to)
	if err := there.install(ctx, m.want); err != nil {
		return err
	}
	m.back, m.tools = to, there
	return m.sweep(ctx)
}

// servesKube says whether kube-proxy translates services with this back end. It
// asks for a chain that is always short.
func (t tools) servesKube() (bool, error) {
	for _, one := range []*tool{t.v4, t.v6} {
		if one == nil {
			continue
		}
		if there, err := one.ipt.ChainExists("nat", "KUBE-POSTROUTING"); err != nil || there {
			return there, err
		}
	}
	return false, nil
}

// legacyTable says whether a table of the legacy back end exists in this
// network namespace.
func legacyTable(name string) bool {
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		names, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err == nil && slices.Contains(strings.Fields(string(names)), name) {
			return true
		}
	}
	return false
}
