package stories

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// raining lets one story at a time take what the machine has: more of them would
// only starve the agents, which are dead to their guards then.
var raining sync.Mutex

// rain is clients that connect without end, and do not try again.
type rain struct {
	cancel context.CancelFunc
	wg     sync.WaitGroup
	made   atomic.Int64
	mu     sync.Mutex
	failed []error
}

// newRain lets each client connect to each address, until stop.
func (s *scene) newRain(to ...netip.AddrPort) *rain {
	raining.Lock()
	ctx, cancel := context.WithCancel(context.Background())
	r := &rain{cancel: cancel}
	for _, h := range s.clients() {
		for _, a := range to {
			r.wg.Go(func() {
				tick := time.NewTicker(rainEvery)
				defer tick.Stop()
				for ctx.Err() == nil {
					r.one(h, a)
					<-tick.C
				}
			})
		}
	}
	return r
}

// rainEvery paces one client.
const rainEvery = 3 * time.Millisecond

// rainWithin is longer than the slowest connect on a busy machine. What fails
// in an upgrade fails at once.
const rainWithin = time.Minute

func (r *rain) one(h *netns.Host, to netip.AddrPort) {
	begun := time.Now()
	err := connectOnce(h, to)
	r.made.Add(1)
	if err == nil {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failed = append(r.failed, fmt.Errorf("%s -> %s, begun %s, after %s: %w", h.Label, to,
		begun.Format("15:04:05.000"), time.Since(begun).Round(time.Millisecond), err))
}

// connectOnce is one connect that must be carried, with a word each way.
func connectOnce(h *netns.Host, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(context.Background(), rainWithin)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", to.String())
	if err != nil {
		return err
	}
	who, err := stack.AskMirror(c, "x", rainWithin)
	_ = c.(*net.TCPConn).SetLinger(0) // no port waits for the next
	_ = c.Close()
	if err == nil && (who.Addr() == h.Addr4 || who.Addr() == h.Addr6) {
		err = errors.New("it was not diverted")
	}
	return err
}

// reach waits until n connects are made.
func (r *rain) reach(t *testing.T, n int) {
	t.Helper()
	if err := netns.Poll(10*time.Minute, func() error {
		if made := r.made.Load(); made < int64(n) {
			return fmt.Errorf("%d connects of %d", made, n)
		}
		return nil
	}); err != nil {
		t.Fatal(err)
	}
}

// stop ends it and returns what has failed, ten at most.
func (r *rain) stop() []error {
	r.cancel()
	r.wg.Wait()
	raining.Unlock()
	r.mu.Lock()
	defer r.mu.Unlock()
	if n := len(r.failed); n > 10 {
		return append(r.failed[:10:10], fmt.Errorf("and %d more of %d connects", n-10, r.made.Load()))
	}
	return r.failed
}
