package rules

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"github.com/kasway/kasway/pkg/observe"
)

const (
	// DefaultResolveInterval is how often host names are resolved again.
	DefaultResolveInterval = 30 * time.Second
	// maxPerFamily bounds the addresses that one name may add to the kernel's
	// sets: 64 of both families together.
	maxPerFamily = 32
	// lookupTimeout bounds one lookup: one lost query and its repetition.
	lookupTimeout = 10 * time.Second
	// parallelLookups is enough for many names and gentle to the DNS server.
	parallelLookups = 8
	// firstRetry is doubled up to the interval while a name has no address at
	// all: an agent often starts before the node's DNS.
	firstRetry = time.Second
)

// Lookup resolves host; network is "ip4" or "ip6". It has the form of
// net.Resolver.LookupNetIP. An error that says that the name has no address of
// this family is a *net.DNSError with IsNotFound, or a *net.AddrError.
type Lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

// ResolverConfig says what a Resolver resolves, and how.
type ResolverConfig struct {
	Targets []Target
	// Interval between two rounds; 0: DefaultResolveInterval.
	Interval time.Duration
	// Lookup is net.DefaultResolver.LookupNetIP if nil.
	Lookup Lookup
	// Changed, if not nil, is called by Run after a round that changed the
	// entries of any target. Run waits for it.
	Changed func()
	Log     logrus.FieldLogger
	Metrics *Metrics // nil: counted nowhere
}

// Resolver knows the entries of every target: its literal addresses, and what
// its host names resolved to last. An answer stays in use until a newer good
// one comes. All methods may be called concurrently.
type Resolver struct {
	cfg   ResolverConfig
	round sync.Mutex // one round at a time
	mu    sync.Mutex
	names map[string]*answer
}

// answer is what is known about one name; v4 and v6 are replaced, never
// changed in place.
type answer struct {
	target       string // one that has the name, for the log
	v4, v6       []netip.Addr
	failing, cut bool
}

// NewResolver knows the literal addresses at once, and names after the first
// round: call Resolve or Run.
func NewResolver(cfg ResolverConfig) *Resolver {
	if cfg.Interval <= 0 {
		cfg.Interval = DefaultResolveInterval
	}
	if cfg.Lookup == nil {
		cfg.Lookup = net.DefaultResolver.LookupNetIP
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewMetrics(nil)
	}
	r := &Resolver{cfg: cfg, names: map[string]*answer{}}
	for _, t := range cfg.Targets {
		for _, a := range t.Addresses {
			if a.Host != "" && r.names[a.Host] == nil {
				r.names[a.Host] = &answer{target: t.Name}
			}
		}
	}
	return r
}

// Entries returns what is diverted for the target of that name, sorted and
// without overlaps; nothing for a target that is unknown or has no address yet.
func (r *Resolver) Entries(target string) []Entry {
	r.mu.Lock()
	defer r.mu.Unlock()
	var entries []Entry
	for _, t := range r.cfg.Targets {
		if t.Name != target {
			continue
		}
		for _, a := range t.Addresses {
			if a.Host == "" {
				entries = append(entries, Entry{a.Prefix, a.Port})
				continue
			}
			known := r.names[a.Host]
			for _, ip := range slices.Concat(known.v4, known.v6) {
				entries = append(entries, Entry{netip.PrefixFrom(ip, ip.BitLen()), a.Port})
			}
		}
	}
	return compact(entries)
}

// Run resolves all names at once and then by interval, until ctx ends. It
// returns at once if there is no name.
func (r *Resolver) Run(ctx context.Context) {
	if len(r.names) == 0 {
		return
	}
	timer := time.NewTimer(0)
	defer timer.Stop()
	for retry := firstRetry; ; retry *= 2 {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		if r.Resolve(ctx) && r.cfg.Changed != nil {
			r.cfg.Changed()
		}
		if !r.waiting() || retry > r.cfg.Interval {
			retry = r.cfg.Interval
		}
		timer.Reset(retry)
	}
}

// waiting reports whether a name has never been resolved.
func (r *Resolver) waiting() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, a := range r.names {
		if len(a.v4)+len(a.v6) == 0 {
			return true
		}
	}
	return false
}

// Resolve makes one round over all names and reports whether any answer
// changed. What ctx cuts short is left as it was.
func (r *Resolver) Resolve(ctx context.Context) bool {
	r.round.Lock()
	defer r.round.Unlock()
	var (
		group   errgroup.Group
		changed bool
	)
	group.SetLimit(parallelLookups)
	for host := range r.names {
		group.Go(func() error {
			v4, v6 := r.lookup(ctx, "ip4", host), r.lookup(ctx, "ip6", host)
			if ctx.Err() != nil {
				return nil
			}
			r.mu.Lock()
			defer r.mu.Unlock()
			changed = r.take(host, v4, v6) || changed
			return nil
		})
	}
	_ = group.Wait() // the functions report through take alone
	return changed
}

// family is the outcome of a lookup of one address family: addresses, or none
// (the name has no such address), or an err that says nothing about the name.
type family struct {
	addrs []netip.Addr
	cut   bool
	err   error
}

func (r *Resolver) lookup(ctx context.Context, network, host string) family {
	ctx, cancel := context.WithTimeout(ctx, lookupTimeout)
	defer cancel()
	answer, err := r.cfg.Lookup(ctx, network, host)
	var (
		dns  *net.DNSError
		none *net.AddrError
	)
	if errors.As(err, &dns) && dns.IsNotFound || errors.As(err, &none) {
		return family{}
	}
	f := family{err: err}
	if err == nil {
		f.addrs, f.cut = usable(answer)
	}
	return f
}

// take puts the outcome of both families into use and reports whether the
// name's addresses changed. r.mu is held.
func (r *Resolver) take(host string, v4, v6 family) bool {
	a := r.names[host]
	err := both(v4.err, v6.err)
	if err == nil && len(v4.addrs)+len(v6.addrs) == 0 {
		err = errors.New("the name has no usable address")
	}
	was := *a
	if len(v4.addrs)+len(v6.addrs) > 0 {
		// A family that has vanished beside a good answer is gone; one that
		// could not be asked for stays.
		if v4.err == nil {
			a.v4 = v4.addrs
		}
		if v6.err == nil {
			a.v6 = v6.addrs
		}
	}
	a.failing, a.cut = err != nil, v4.cut || v6.cut
	changed := !slices.Equal(was.v4, a.v4) || !slices.Equal(was.v6, a.v6)
	r.report(host, was, *a, err, changed)
	return changed
}

// kept says what is used of a name that cannot be resolved now.
func kept(known int) string {
	switch known {
	case 0:
		return "it has no address yet"
	case 1:
		return "its last known address stays in use"
	}
	return fmt.Sprintf("its last %d known addresses stay in use", known)
}

// both is one line about the two families, which mostly fail alike.
func both(v4, v6 error) error {
	switch {
	case v4 == nil:
		return v6
	case v6 == nil || v4.Error() == v6.Error():
		return v4
	}
	return fmt.Errorf("%w; %w", v4, v6)
}

// report tells of changes only: a name that keeps failing is counted, not
// logged again.
func (r *Resolver) report(host string, was, is answer, err error, changed bool) {
	log := r.cfg.Log.WithField(observe.FieldTarget, is.target)
	known := len(is.v4) + len(is.v6)
	if is.failing {
		r.cfg.Metrics.failures.Inc()
	}
	if changed {
		log.Infof("%s has %d addresses now: %v", host, known, slices.Concat(is.v4, is.v6))
	}
	switch {
	case is.failing && !was.failing:
		r.cfg.Metrics.failing.Inc()
		log.WithError(err).Warnf("cannot resolve %s; %s", host, kept(known))
	case was.failing && !is.failing:
		r.cfg.Metrics.failing.Dec()
		log.Infof("%s is resolved again", host)
	}
	if is.cut && !was.cut {
		log.Warnf("%s has more addresses than can be diverted; only the first %d of each family are", host, maxPerFamily)
	}
}
