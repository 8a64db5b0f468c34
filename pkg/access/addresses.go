package access

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// Names come from the configuration alone, so there are few of them.
const (
	// resolveFresh is how long an answer is used without asking again.
	resolveFresh = 5 * time.Second
	// resolvePatience is how long a new answer is waited for while an old one
	// is at hand.
	resolvePatience = time.Second
	// attemptMin is the least time that one of several addresses is given: a
	// round trip around the world. The time to share is an upstream's dial
	// timeout, 2 s by default.
	attemptMin = 250 * time.Millisecond
)

// Resolver is the part of *net.Resolver that GuardAddresses needs.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// GuardAddresses resolves the target's name ("host:port") and hands next only
// addresses that the name may mean, so that what was checked is what is
// dialled. A name that leads to this host itself (loopback), to its link, to a
// group or to no address at all means something only if it was written as that
// address, or as localhost: whoever controls a name must not choose what we
// reach here. Addresses are tried in the resolver's order. While resolving
// fails, the last good answer stays in use.
func GuardAddresses(r Resolver, next dial.Func) dial.Func {
	g := &addresses{resolver: r, next: next, known: map[string]answer{}, now: time.Now}
	return g.dial
}

type addresses struct {
	resolver Resolver
	next     dial.Func
	now      func() time.Time

	mu    sync.Mutex
	known map[string]answer
}

type answer struct {
	addrs []netip.Addr
	at    time.Time
}

func (g *addresses) dial(ctx context.Context, t dial.Target) (dial.Conn, error) {
	d, err := ParseDestination(t.Name)
	if err != nil {
		return nil, err
	}
	addrs, err := g.lookup(ctx, d)
	if err != nil {
		return nil, err
	}
	var failed []error
	for i, a := range addrs {
		to := t
		to.Name = netip.AddrPortFrom(a, d.Port).String()
		attempt, cancel := share(ctx, len(addrs)-i)
		c, err := g.next(attempt, to)
		cancel()
		if err == nil {
			return c, nil
		}
		failed = append(failed, dial.Classify(err))
		if ctx.Err() != nil {
			break
		}
	}
	return nil, errors.Join(failed...)
}

// lookup returns the addresses that d may mean, at least one.
func (g *addresses) lookup(ctx context.Context, d Destination) ([]netip.Addr, error) {
	switch {
	case d.Addr.IsValid():
		return []netip.Addr{d.Addr}, nil
	case d.Host == "localhost":
		// RFC 6761: the name never needs a resolver, nor a hosts file.
		return []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}, nil
	}
	all, err := g.resolve(ctx, d.Host)
	if err != nil {
		return nil, dial.Classify(fmt.Errorf("resolving %s: %w", d.Host, err))
	}
	var may []netip.Addr
	for _, a := range all {
		if a = a.Unmap(); !special(a) {
			may = append(may, a)
		}
	}
	if len(may) == 0 {
		return nil, &Denial{ReasonAddress, fmt.Sprintf("%s resolves to %v, which must be named literally to be allowed", d.Host, all)}
	}
	return may, nil
}

// resolve asks the resolver, unless a fresh answer is at hand.
func (g *addresses) resolve(ctx context.Context, host string) ([]netip.Addr, error) {
	g.mu.Lock()
	last, ok := g.known[host]
	g.mu.Unlock()
	if ok && g.now().Sub(last.at) < resolveFresh {
		return last.addrs, nil
	}
	ask := ctx
	if ok {
		var cancel context.CancelFunc
		ask, cancel = context.WithTimeout(ctx, resolvePatience)
		defer cancel()
	}
	addrs, err := g.resolver.LookupNetIP(ask, "ip", host)
	if err == nil && len(addrs) == 0 {
		err = fmt.Errorf("%w: the name has no address", dial.ErrUnreachable)
	}
	if err != nil {
		if !ok || ctx.Err() != nil {
			return nil, err
		}
		// The last good answer, for as long as a new one would have been
		// used: a dead resolver delays one dial in resolveFresh, not each.
		addrs = last.addrs
	}
	g.mu.Lock()
	g.known[host] = answer{addrs, g.now()}
	g.mu.Unlock()
	return addrs, nil
}

// special reports whether a is no address of another host: this host, its
// link, a group, or the unspecified address, which Linux connects to itself.
func special(a netip.Addr) bool {
	return a.IsLoopback() || a.IsLinkLocalUnicast() || a.IsMulticast() || a.IsUnspecified()
}

// share gives the next of n addresses its part of what is left of ctx.
func share(ctx context.Context, n int) (context.Context, context.CancelFunc) {
	end, ok := ctx.Deadline()
	if !ok || n == 1 {
		return ctx, func() {}
	}
	return context.WithTimeout(ctx, max(time.Until(end)/time.Duration(n), attemptMin))
}
