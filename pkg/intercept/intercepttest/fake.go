package intercepttest

import (
	"context"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// Fake is a Mode in memory: it remembers what it was told, and Dial connects
// as a diverted client would. Its methods may be called concurrently. The zero
// value is ready for use.
type Fake struct {
	mu      sync.Mutex
	report  intercept.Report
	fail    error
	damage  []intercept.Damage
	blind   error
	looked  int
	applied []rules.State
	closed  int
	active  bool
	changed chan struct{}
}

var _ intercept.Mode = (*Fake)(nil)

// Preflight returns what SetReport has set.
func (f *Fake) Preflight(context.Context) intercept.Report {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.report
}

// Apply remembers s, unless FailApply has set an error.
func (f *Fake) Apply(ctx context.Context, s rules.State) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.fail != nil {
		return f.fail
	}
	f.applied, f.active, f.damage = append(f.applied, s), true, nil
	f.announce()
	return ctx.Err()
}

// Verify tells of what Damage has set since the last Apply.
func (f *Fake) Verify(context.Context) ([]intercept.Damage, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.looked++
	f.announce()
	return f.damage, f.blind
}

// Close ends the diverting.
func (f *Fake) Close() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed++
	f.active = false
	f.announce()
	return nil
}

func (f *Fake) announce() {
	if f.changed != nil {
		close(f.changed)
		f.changed = nil
	}
}

// SetReport sets the answer of Preflight.
func (f *Fake) SetReport(r intercept.Report) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.report = r
}

// FailApply makes Apply fail with err; nil makes it work again.
func (f *Fake) FailApply(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail = err
}

// Damage makes Verify tell of this until the next Apply, which mends it.
func (f *Fake) Damage(d ...intercept.Damage) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.damage = d
}

// FailVerify makes Verify fail with err; nil makes it work again.
func (f *Fake) FailVerify(err error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.blind = err
}

// Verified is how often Verify was called.
func (f *Fake) Verified() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.looked
}

// Applied is every state so far, the newest last.
func (f *Fake) Applied() []rules.State {
	f.mu.Lock()
	defer f.mu.Unlock()
	return append([]rules.State(nil), f.applied...)
}

// Closed is how often Close was called.
func (f *Fake) Closed() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.closed
}

// Await returns once ok accepts the newest state, active tells whether it is
// in force. It returns ctx's error if that ends first.
func (f *Fake) Await(ctx context.Context, ok func(s rules.State, active bool) bool) error {
	for {
		f.mu.Lock()
		var s rules.State
		if n := len(f.applied); n > 0 {
			s = f.applied[n-1]
		}
		active := f.active
		if f.changed == nil {
			f.changed = make(chan struct{})
		}
		changed := f.changed
		f.mu.Unlock()
		if ok(s, active) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// Dial does what a connect to dst of a host process (or, with pod, of a pod)
// would do: it arrives at the target's listener, or is refused. A dst that is
// no target's, and every dst while the mode is not active, is dialled as it is.
// Pod listeners are reached at the node-local addresses of the state.
func (f *Fake) Dial(ctx context.Context, dst netip.AddrPort, pod bool) (net.Conn, error) {
	f.mu.Lock()
	var d *rules.Divert
	var s rules.State
	if f.active {
		s = f.applied[len(f.applied)-1]
		d, _ = s.Match(dst)
	}
	f.mu.Unlock()
	to := dst
	if d != nil {
		if d.Refused {
			return nil, &net.OpError{Op: "dial", Net: "tcp", Err: syscall.ECONNREFUSED}
		}
		to = listener(s, d.Ports, dst.Addr().Unmap().Is6(), pod)
	}
	return (&net.Dialer{}).DialContext(ctx, "tcp", net.JoinHostPort(to.Addr().String(), strconv.Itoa(int(to.Port()))))
}

func listener(s rules.State, p rules.Ports, v6, pod bool) netip.AddrPort {
	switch {
	case pod && v6:
		return netip.AddrPortFrom(s.Node6, p.Pod6)
	case pod:
		return netip.AddrPortFrom(s.Node4, p.Pod4)
	case v6:
		return netip.AddrPortFrom(netip.IPv6Loopback(), p.Host6)
	}
	return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), p.Host4)
}
