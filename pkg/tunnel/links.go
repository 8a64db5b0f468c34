package tunnel

import (
	"cmp"
	"context"
	"crypto/tls"
	"fmt"
	"math/rand/v2"
	"net"
	"slices"
	"sync"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
)

// LinksConfig is what Links needs. All but Servers may be left out.
type LinksConfig struct {
	// Servers are "host:port" of every server; a link is kept to each.
	Servers []string
	// TLS is used with TLS 1.3 and HTTP/2 only, whatever it says about those. An
	// empty ServerName becomes the host of each server. nil is plain text.
	TLS *tls.Config
	// DialContext makes the TCP connections of the links.
	DialContext func(ctx context.Context, network, addr string) (net.Conn, error)
	// Node and Version are what servers are told of this agent.
	Node, Version string
	Log           logrus.FieldLogger
	Metrics       *LinksMetrics
}

// States of a link.
const (
	StateConnecting = "connecting"
	StateUp         = "up"
	StateWaiting    = "waiting" // to try again
)

// LinkStatus is one link at one moment.
type LinkStatus struct {
	Server string
	State  string
	Since  time.Time // when State began
	// RTT is the kernel's estimate, or how long the hello took; 0 if not up.
	RTT time.Duration
	// LastError is why the link last failed, for people; "" if it never did.
	LastError string
	// Version of the server, "" until it said so.
	Version string
	// Streams carried now by the link's current connection.
	Streams int
	// Targets is what the server says of each target's upstreams.
	Targets map[string]bool
}

// Snapshot is all links at one moment, in the order of LinksConfig.Servers.
type Snapshot struct{ Links []LinkStatus }

// Carries reports whether some link is up whose server does not say that the
// target's upstreams are down.
func (s Snapshot) Carries(target string) bool {
	return slices.ContainsFunc(s.Links, func(l LinkStatus) bool {
		up, known := l.Targets[target]
		return l.State == StateUp && (up || !known)
	})
}

// Links keeps one link to every server and carries connections over them. Its
// methods may be called concurrently.
type Links struct {
	cfg   LinksConfig
	links []*link

	mu      sync.Mutex
	changed chan struct{}
}

// NewLinks makes Links that do nothing until Run.
func NewLinks(cfg LinksConfig) *Links {
	if cfg.DialContext == nil {
		cfg.DialContext = new(net.Dialer).DialContext
	}
	if cfg.Log == nil {
		cfg.Log = logrus.StandardLogger()
	}
	if cfg.Metrics == nil {
		cfg.Metrics = NewLinksMetrics(nil)
	}
	l := &Links{cfg: cfg, changed: make(chan struct{})}
	for _, server := range cfg.Servers {
		l.links = append(l.links, newLink(l, server))
	}
	return l
}

// Run keeps the links until ctx ends, then resets what they carry, closes them
// and returns nil. It is called once.
func (l *Links) Run(ctx context.Context) error {
	var wg sync.WaitGroup
	for _, link := range l.links {
		wg.Go(func() { link.run(ctx) })
	}
	wg.Wait()
	return nil
}

// Dial is a dial.Func. It returns without waiting for the server: the result of
// dialling there is the first error of the Conn. Without any link it fails with
// dial.ErrNoLink at once.
//
// Links whose server says that the target's upstreams are down come last;
// otherwise the one with the fewest streams is taken.
func (l *Links) Dial(ctx context.Context, t dial.Target) (dial.Conn, error) {
	open, err := encodeOpen(t)
	if err != nil {
		return nil, fmt.Errorf("dial %s: %w", t.Name, err)
	}
	why := fmt.Errorf("dial %s: %w", t.Name, dial.ErrNoLink)
	for _, s := range l.candidates(t.Name) {
		c, err := s.open(ctx, t, open)
		if err == nil {
			return c, nil
		}
		why = fmt.Errorf("dial %s: %w", t.Name, err)
		// Nothing has left for the server, so another link may be tried.
		if ctx.Err() != nil {
			break
		}
	}
	return nil, why
}

// candidates lists the sessions that are up, best first.
func (l *Links) candidates(target string) []*session {
	type candidate struct {
		*session
		down bool
		load int
	}
	var list []candidate
	for _, link := range l.links {
		if s, down := link.current(target); s != nil {
			list = append(list, candidate{s, down, s.load()})
		}
	}
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] })
	slices.SortStableFunc(list, func(a, b candidate) int {
		if a.down != b.down {
			if a.down {
				return 1
			}
			return -1
		}
		return cmp.Compare(a.load, b.load)
	})
	sessions := make([]*session, len(list))
	for i, c := range list {
		sessions[i] = c.session
	}
	return sessions
}

// Snapshot returns the links as they are now.
func (l *Links) Snapshot() Snapshot {
	s := Snapshot{Links: make([]LinkStatus, len(l.links))}
	for i, link := range l.links {
		s.Links[i] = link.status()
	}
	return s
}

// Changed returns a channel that is closed when a link's state or its targets
// change next. Take it before Snapshot, and a new one each time.
func (l *Links) Changed() <-chan struct{} {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.changed
}

func (l *Links) notify() {
	l.mu.Lock()
	defer l.mu.Unlock()
	close(l.changed)
	l.changed = make(chan struct{})
}

// up counts the links that are up.
func (l *Links) up() int {
	n := 0
	for _, link := range l.links {
		if s, _ := link.current(""); s != nil {
			n++
		}
	}
	return n
}
