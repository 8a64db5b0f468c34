package tunnel

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/observe"
)

// link keeps one session with one server. Sessions that lost their Control live
// on, without new streams, while a new one takes over.
type link struct {
	links  *Links
	server string
	// sessions counts those that are not closed yet.
	sessions sync.WaitGroup

	mu      sync.Mutex
	state   string
	since   time.Time
	session *session // not nil while state is StateUp
	lastErr error
	targets map[string]bool
}

func newLink(l *Links, server string) *link {
	return &link{links: l, server: server, state: StateConnecting, since: time.Now()}
}

// linkError is a failure to bring up a link; step is a label of a metric.
type linkError struct {
	step string
	err  error
}

// Steps of bringing up a link.
const (
	stepConnect = "connect"
	stepTLS     = "tls"
	stepHello   = "hello"
	stepVersion = "version"
	stepDenied  = "denied"
	stepLost    = "lost"
)

func (e *linkError) Error() string { return e.step + ": " + e.err.Error() }
func (e *linkError) Unwrap() error { return e.err }

// run keeps the link until ctx ends.
func (l *link) run(ctx context.Context) {
	var (
		b     backoff
		wasUp bool
	)
	for ctx.Err() == nil {
		l.set(StateConnecting, nil, nil)
		s, err := l.establish(ctx)
		if err == nil {
			if wasUp {
				l.links.cfg.Metrics.reconnects.Inc()
			}
			wasUp = true
			err = l.serve(s, &b)
		}
		if ctx.Err() != nil {
			break
		}
		l.fail(ctx, &b, err)
	}
	l.set(StateWaiting, nil, nil)
	l.sessions.Wait()
}

// serve uses a session until it can take no new streams, and leaves it to end
// by itself.
func (l *link) serve(s *session, b *backoff) error {
	log := l.links.cfg.Log.WithField(observe.FieldServer, l.server)
	l.set(StateUp, s, nil)
	log.WithField("version", s.peer.GetVersion()).Info("link is up")
	start := time.Now()
	err := s.serve()
	b.held(time.Since(start))
	l.sessions.Go(s.drain)
	return &linkError{stepLost, err}
}

// fail reports a failure and waits until the next try.
func (l *link) fail(ctx context.Context, b *backoff, err error) {
	limit, step := backoffRejected, stepHello
	var failed *linkError
	if errors.As(err, &failed) {
		step = failed.step
	}
	if step == stepConnect || step == stepLost {
		limit = backoffRefused
	}
	l.links.cfg.Metrics.failures.WithLabelValues(step).Inc()
	l.set(StateWaiting, nil, err)
	log := l.links.cfg.Log.WithField(observe.FieldServer, l.server).WithError(err)
	// A server that stays away is reported at the 1st, 2nd, 4th, ... failure.
	switch n := b.failures; {
	case step == stepLost && l.links.up() == 0:
		log.Error("the last link is lost")
	case n&(n-1) == 0:
		log.Warn("no link to the server")
	default:
		log.Debug("no link to the server")
	}
	timer := time.NewTimer(b.next(limit))
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-ctx.Done():
	}
}

// set moves the link to a state; a nil err leaves the last one.
func (l *link) set(state string, s *session, err error) {
	l.mu.Lock()
	wasUp := l.session != nil
	l.state, l.since, l.session, l.targets = state, time.Now(), s, nil
	if s != nil {
		l.targets = s.initial
	}
	if err != nil {
		l.lastErr = err
	}
	l.mu.Unlock()
	if isUp := s != nil; isUp != wasUp {
		if isUp {
			l.links.cfg.Metrics.up.Inc()
		} else {
			l.links.cfg.Metrics.up.Dec()
		}
	}
	l.links.notify()
}

// setTargets takes what the server of s says, unless s is no longer current.
func (l *link) setTargets(s *session, targets map[string]bool) {
	l.mu.Lock()
	current := l.session == s
	if current {
		l.targets = targets
	}
	l.mu.Unlock()
	if current {
		l.links.notify()
	}
}

// current returns the session that takes new streams, nil if there is none, and
// whether its server says that the target is down.
func (l *link) current(target string) (s *session, down bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	up, known := l.targets[target]
	return l.session, known && !up
}

func (l *link) status() LinkStatus {
	l.mu.Lock()
	defer l.mu.Unlock()
	s := LinkStatus{Server: l.server, State: l.state, Since: l.since, Targets: maps.Clone(l.targets)}
	if l.lastErr != nil {
		s.LastError = l.lastErr.Error()
	}
	if l.session != nil {
		s.Version = l.session.peer.GetVersion()
		s.RTT = l.session.rtt()
		s.Streams = l.session.load()
	}
	return s
}
