package upstream

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/dial"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

type conn struct {
	net.Conn
	to string
}

func (*conn) Close() error      { return nil }
func (*conn) CloseWrite() error { return nil }
func (*conn) Abort(error)       {}

// world is what the addresses of a pool do: nil accepts, errHang stays silent.
type world struct {
	mu      sync.Mutex
	answers map[string]error
	dialled []string
}

var errHang = errors.New("silence")

func (w *world) set(address string, err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.answers[address] = err
}

func (w *world) dial(ctx context.Context, t dial.Target) (dial.Conn, error) {
	w.mu.Lock()
	w.dialled = append(w.dialled, t.Name)
	err := w.answers[t.Name]
	w.mu.Unlock()
	if errors.Is(err, errHang) {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if err != nil {
		return nil, err
	}
	return &conn{to: t.Name}, nil
}

// took returns what was dialled since the last call.
func (w *world) took() string {
	w.mu.Lock()
	defer w.mu.Unlock()
	s := strings.Join(w.dialled, " ")
	w.dialled = nil
	return s
}

func newWorld(t *testing.T, addresses ...string) (*world, *Pool, *Metrics, *logtest.Hook) {
	t.Helper()
	log, hook := logtest.NewNullLogger()
	w := &world{answers: map[string]error{}}
	m := NewMetrics(prometheus.NewRegistry())
	p, err := NewPool(Config{Name: "kas", Addresses: addresses, Dialer: w.dial, Log: log, Metrics: m})
	if err != nil {
		t.Fatal(err)
	}
	return w, p, m, hook
}

func dialOnce(t *testing.T, p *Pool) string {
	t.Helper()
	c, err := p.Dial(t.Context(), dial.Target{Name: "ignored"})
	if err != nil {
		t.Fatal(err)
	}
	return c.(*conn).to
}

func TestNearestFirstWithFailover(t *testing.T) {
	for _, cause := range []error{syscall.ECONNREFUSED, syscall.EHOSTUNREACH, syscall.ETIMEDOUT, syscall.ENETUNREACH} {
		w, p, m, hook := newWorld(t, "a:1", "b:1", "c:1")
		if to := dialOnce(t, p); to != "a:1" || w.took() != "a:1" {
			t.Fatalf("the first dial went to %s", to)
		}
		w.set("a:1", cause)
		if to := dialOnce(t, p); to != "b:1" {
			t.Errorf("%v: failed over to %s", cause, to)
		}
		if got := w.took(); got != "a:1 b:1" {
			t.Errorf("%v: dialled %s", cause, got)
		}
		// What is known to be down costs the next one nothing.
		if to := dialOnce(t, p); to != "b:1" || w.took() != "b:1" {
			t.Errorf("%v: then %s", cause, to)
		}
		if !p.Up() {
			t.Errorf("%v: a pool with two addresses left is down", cause)
		}
		if v := testutil.ToFloat64(m.up.WithLabelValues("kas", "a:1")); v != 0 {
			t.Errorf("%v: up gauge %v", cause, v)
		}
		if n := len(hook.Entries); n != 1 || hook.LastEntry().Data["upstream"] != "a:1" {
			t.Errorf("%v: %d log lines", cause, n)
		}
	}
}

func TestAllDown(t *testing.T) {
	w, p, m, _ := newWorld(t, "a:1", "b:1")
	w.set("a:1", syscall.ECONNREFUSED)
	w.set("b:1", syscall.EHOSTUNREACH)
	changed := p.Changed()
	_, err := p.Dial(t.Context(), dial.Target{})
	// One sentinel alone: what travels must not depend on who asks first.
	if !errors.Is(err, dial.ErrNoUpstream) || errors.Is(err, dial.ErrRefused) || errors.Is(err, dial.ErrUnreachable) {
		t.Errorf("%v", err)
	}
	var errno syscall.Errno
	if !errors.As(err, &errno) || errno != syscall.ECONNREFUSED {
		t.Errorf("the cause is lost: %v", errno)
	}
	if !dial.NotDialled(err) || !strings.Contains(err.Error(), "kas: a:1: ") || !strings.Contains(err.Error(), "; b:1: ") {
		t.Errorf("error %q", err)
	}
	if p.Up() {
		t.Error("still up")
	}
	select {
	case <-changed:
	default:
		t.Error("nobody was told")
	}
	// The last one is never given up: both are tried again, each time.
	w.took()
	if _, err := p.Dial(t.Context(), dial.Target{}); err == nil || w.took() != "a:1 b:1" {
		t.Errorf("a pool that is down was not tried: %v", err)
	}
	changed = p.Changed()
	w.set("b:1", nil)
	if to := dialOnce(t, p); to != "b:1" || !p.Up() {
		t.Errorf("dialled %s, up %v", to, p.Up())
	}
	select {
	case <-changed:
	default:
		t.Error("nobody was told that it is up")
	}
	if n := testutil.ToFloat64(m.dials.WithLabelValues("kas", "a:1", "refused")); n != 3 {
		t.Errorf("%v refused dials counted", n)
	}
	if n := testutil.ToFloat64(m.dials.WithLabelValues("kas", "b:1", "ok")); n != 1 {
		t.Errorf("%v good dials counted", n)
	}
}

// A single server under stress answers late: it must still be tried.
func TestLastOneIsNeverEvicted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, p, _, _ := newWorld(t, "a:1")
		w.set("a:1", errHang)
		start := time.Now()
		_, err := p.Dial(t.Context(), dial.Target{})
		if !errors.Is(err, dial.ErrNoUpstream) || !strings.Contains(err.Error(), dial.ErrTimeout.Error()) || time.Since(start) != DefaultDialTimeout {
			t.Errorf("%v after %v", err, time.Since(start))
		}
		w.set("a:1", nil)
		if to := dialOnce(t, p); to != "a:1" {
			t.Errorf("dialled %s", to)
		}
	})
}

func TestSilentAddressLeavesTimeForTheNext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, p, _, _ := newWorld(t, "a:1", "b:1")
		w.set("a:1", errHang)
		start := time.Now()
		if to := dialOnce(t, p); to != "b:1" || time.Since(start) != DefaultDialTimeout {
			t.Errorf("%s after %v", to, time.Since(start))
		}
	})
}

func TestGivingUpSaysNothingAboutTheUpstream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, p, m, hook := newWorld(t, "a:1", "b:1")
		w.set("a:1", errHang)
		ctx, cancel := context.WithTimeout(t.Context(), DefaultDialTimeout/2)
		defer cancel()
		if _, err := p.Dial(ctx, dial.Target{}); !errors.Is(err, dial.ErrTimeout) || errors.Is(err, dial.ErrNoUpstream) {
			t.Errorf("out of time: %v", err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		time.AfterFunc(time.Millisecond, cancel)
		if _, err := p.Dial(ctx, dial.Target{}); !errors.Is(err, context.Canceled) {
			t.Errorf("cancelled: %v", err)
		}
		if got := w.took(); got != "a:1 a:1" || len(hook.Entries) != 0 || !p.Up() {
			t.Errorf("dialled %s, logged %d lines", got, len(hook.Entries))
		}
		if v := testutil.ToFloat64(m.up.WithLabelValues("kas", "a:1")); v != 1 {
			t.Error("the upstream was blamed")
		}
		synctest.Wait()
	})
}

func TestOurOwnShortageSaysNothingAboutTheUpstream(t *testing.T) {
	w, p, _, hook := newWorld(t, "a:1", "b:1")
	w.set("a:1", syscall.EMFILE)
	if _, err := p.Dial(t.Context(), dial.Target{}); !errors.Is(err, dial.ErrLimit) || errors.Is(err, dial.ErrNoUpstream) {
		t.Errorf("%v", err)
	}
	if got := w.took(); got != "a:1" || len(hook.Entries) != 0 {
		t.Errorf("dialled %s, logged %d lines", got, len(hook.Entries))
	}
}

func TestDeniedEverywhereIsDenied(t *testing.T) {
	w, p, _, _ := newWorld(t, "a:1", "b:1")
	w.set("a:1", fmt.Errorf("%w: a", dial.ErrDenied))
	w.set("b:1", fmt.Errorf("%w: b", dial.ErrDenied))
	if _, err := p.Dial(t.Context(), dial.Target{}); !errors.Is(err, dial.ErrDenied) || dial.NotDialled(err) {
		t.Errorf("%v may be retried elsewhere", err)
	}
	w.set("b:1", syscall.ECONNREFUSED)
	if _, err := p.Dial(t.Context(), dial.Target{}); errors.Is(err, dial.ErrDenied) || !errors.Is(err, dial.ErrNoUpstream) {
		t.Errorf("%v", err)
	}
}

func TestProbesBringItBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w, p, _, hook := newWorld(t, "a:1", "b:1")
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan struct{})
		go func() { p.Run(ctx); close(done) }()
		time.Sleep(time.Hour)
		if got := w.took(); got != "" {
			t.Errorf("probed what is up: %s", got)
		}
		w.set("a:1", syscall.ECONNREFUSED)
		w.set("b:1", errHang)
		if _, err := p.Dial(ctx, dial.Target{}); !errors.Is(err, dial.ErrNoUpstream) {
			t.Fatal(err)
		}
		time.Sleep(10*time.Second + time.Millisecond)
		probes := strings.Count(w.took(), "a:1")
		if most := int(12*time.Second/DefaultProbeEvery) + 3; probes < 20 || probes > most {
			t.Errorf("%d probes of a in 12 s", probes)
		}
		changed := p.Changed()
		w.set("a:1", nil)
		start := time.Now()
		select {
		case <-changed:
		case <-time.After(time.Minute):
		}
		if d := time.Since(start); d > DefaultProbeEvery || !p.Up() {
			t.Errorf("back after %v, up %v", d, p.Up())
		}
		w.took()
		if to := dialOnce(t, p); to != "a:1" {
			t.Errorf("dialled %s", to)
		}
		if e := hook.LastEntry(); e.Message != "upstream is up again" || e.Data["upstream"] != "a:1" {
			t.Errorf("logged %q %v", e.Message, e.Data)
		}
		cancel()
		<-done
	})
}

// Many dials while addresses come and go: the counts stay right.
func TestConcurrentChanges(t *testing.T) {
	w, p, _, _ := newWorld(t, "a:1", "b:1", "c:1")
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			for n := range 200 {
				var err error
				if (n+i)%2 == 0 {
					err = syscall.ECONNREFUSED
				}
				w.set(p.members[(n+i)%3].address, err)
				_, _ = p.Dial(t.Context(), dial.Target{})
			}
		})
	}
	wg.Wait()
	up := 0
	for _, m := range p.members {
		if !m.down {
			up++
		}
	}
	if p.up != up || p.Up() != (up > 0) {
		t.Errorf("%d members are up, counted %d", up, p.up)
	}
}
