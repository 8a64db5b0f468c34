package agent

import (
	"context"
	"errors"
	"io"
	"maps"
	"net"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
)

// links are Links that carry what they are told to.
type links struct {
	mu      sync.Mutex
	carries map[string]bool
	changed chan struct{}
	status  []LinkStatus
	running bool
	asked   int // how often Carries was called
	// once is carried when first asked for, and not any more.
	once string
	fail chan error
	// atEnd is called when Run is told to end.
	atEnd func()
}

func newLinks() *links {
	return &links{carries: map[string]bool{}, changed: make(chan struct{}), fail: make(chan error), atEnd: func() {}}
}

func (l *links) Run(ctx context.Context) error {
	l.mu.Lock()
	l.running = true
	l.mu.Unlock()
	select {
	case err := <-l.fail:
		return err
	case <-ctx.Done():
		l.atEnd()
		return nil
	}
}

func (l *links) Carries(target string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.asked++
	if l.once != "" && l.once == target {
		l.once = ""
		return true
	}
	return l.carries[target]
}

func (l *links) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

func (l *links) Status() []LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.status
}

// set makes the links carry those targets and no other.
func (l *links) set(targets ...string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	carries := map[string]bool{}
	for _, t := range targets {
		carries[t] = true
	}
	if maps.Equal(carries, l.carries) {
		return
	}
	l.carries = carries
	close(l.changed)
	l.changed = make(chan struct{})
}

func (l *links) show(s ...LinkStatus) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.status = s
}

// mode is intercepttest's, which also diverts the self-test, as the kernel
// would: its connections come to the node's own addresses, where nobody listens.
type mode struct {
	intercepttest.Fake
	// onApply and onClose are called before the Fake is; an error is Apply's.
	onApply func(context.Context, rules.State) error
	onClose func()

	wg   sync.WaitGroup
	open []net.Listener
}

func newMode() *mode {
	return &mode{onApply: func(context.Context, rules.State) error { return nil }, onClose: func() {}}
}

func (m *mode) Apply(ctx context.Context, s rules.State) error {
	if err := m.onApply(ctx, s); err != nil {
		return err
	}
	if err := m.Fake.Apply(ctx, s); err != nil || m.open != nil {
		return err
	}
	for _, d := range s.Diverts {
		for _, e := range d.Entries {
			if d.Name != intercept.SelfTestName || e.Port == d.Ports.Host4 || e.Port == d.Ports.Pod4 {
				continue // of mode listen: it is the listener's own
			}
			to := netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), d.Ports.Host4)
			if err := m.forward(netip.AddrPortFrom(e.Prefix.Addr(), e.Port), to); err != nil {
				return err
			}
		}
	}
	return nil
}

// letGo ends the diverting of the self-test, as somebody else's rule would;
// takeBack lets the next Apply divert it again. Nothing else may be applied
// between them.
func (m *mode) letGo() {
	for _, l := range m.open {
		shut(l)
	}
}

func (m *mode) takeBack() { m.open = nil }

func (m *mode) Close() error {
	m.onClose()
	for _, l := range m.open {
		shut(l)
	}
	m.open = nil
	m.wg.Wait()
	return m.Fake.Close()
}

// forward carries one connection at a time from at to to.
func (m *mode) forward(at, to netip.AddrPort) error {
	l, err := net.Listen("tcp", at.String())
	if err != nil {
		return err
	}
	m.open = append(m.open, l)
	m.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			if far, err := net.Dial("tcp", to.String()); err == nil {
				var sent sync.WaitGroup
				sent.Go(func() { _, _ = io.Copy(far, c) })
				_, _ = io.Copy(c, far)
				shut(c)
				shut(far)
				sent.Wait()
			}
			shut(c)
		}
	})
	return nil
}

// listens reports whether every listener of s takes connections.
func listens(s rules.State) error {
	var errs []error
	for _, d := range s.Diverts {
		for _, at := range []netip.AddrPort{
			netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), d.Ports.Host4), netip.AddrPortFrom(netip.IPv6Loopback(), d.Ports.Host6),
			netip.AddrPortFrom(s.Node4, d.Ports.Pod4), netip.AddrPortFrom(s.Node6, d.Ports.Pod6),
		} {
			c, err := net.DialTimeout("tcp", at.String(), bound)
			if err == nil {
				shut(c)
			}
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

// newest is the state in force once ok accepts it.
func (m *mode) newest(t *testing.T, what string, ok func(rules.State) bool) (s rules.State) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), bound)
	defer cancel()
	start := time.Now()
	err := m.Await(ctx, func(st rules.State, active bool) bool {
		s = st
		return active && ok(st)
	})
	if err != nil {
		t.Fatalf("%s: not within %s: %+v", what, time.Since(start), s)
	}
	return s
}
