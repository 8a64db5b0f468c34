//go:build chaos

package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// What became of one connect.
const (
	carried = "carried" // by the agent, to the KAS
	direct  = "direct"  // to the KAS, past the agent
	refused = "refused" // ECONNREFUSED from connect
	broken  = "broken"  // connected, and then cut
	odd     = "odd"     // any other error from connect
)

// connect is one connect of the storm.
type connect struct {
	from    string
	begun   time.Time
	blocked time.Duration // in connect
	ended   time.Time
	what    string
	err     error
}

func (c connect) String() string {
	return fmt.Sprintf("%s: %s after %s in connect: %v", c.from, c.what, c.blocked.Round(time.Millisecond), c.err)
}

// storm connects without end, with one worker for each client and address.
type storm struct {
	workers int
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	mu      sync.Mutex
	all     []connect
}

func newStorm(clients []*netns.Host, to []netip.AddrPort) *storm {
	ctx, cancel := context.WithCancel(context.Background())
	s := &storm{cancel: cancel, workers: len(clients) * len(to)}
	for _, h := range clients {
		for _, a := range to {
			s.wg.Go(func() { _ = h.Do(func() error { s.work(ctx, h, a); return nil }) })
		}
	}
	return s
}

func (s *storm) work(ctx context.Context, h *netns.Host, to netip.AddrPort) {
	own := []netip.Addr{h.Addr4, h.Addr6}
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c := one(h.Label+" -> "+to.String(), to, own)
		s.mu.Lock()
		s.all = append(s.all, c)
		s.mu.Unlock()
	}
}

// one connects from the calling thread. The KAS sees the client's own address
// only if nobody stands between them.
func one(from string, to netip.AddrPort, own []netip.Addr) connect {
	c := connect{from: from, begun: time.Now()}
	conn, err := (&net.Dialer{Timeout: 20 * time.Second}).Dial("tcp", to.String())
	c.blocked = time.Since(c.begun)
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		c.what = refused
	case errors.Is(err, syscall.ECONNRESET):
		// Taken and cut so soon that connect has not returned yet.
		c.what = broken
	case err != nil:
		c.what = odd
	default:
		var who netip.AddrPort
		who, err = stack.AskMirror(conn, "x", 6*time.Second)
		_ = conn.(*net.TCPConn).SetLinger(0)
		_ = conn.Close()
		switch {
		case err != nil:
			c.what = broken
		case slices.Contains(own, who.Addr()):
			c.what = direct
		default:
			c.what = carried
		}
	}
	c.err, c.ended = err, time.Now()
	return c
}

func (s *storm) seen() []connect {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Clone(s.all)
}

func (s *storm) end() []connect {
	s.cancel()
	s.wg.Wait()
	return s.all
}

// proceed waits until every worker has ended n connects that began after from.
func (s *storm) proceed(from time.Time, n int) error {
	return netns.Poll(30*time.Second, func() error {
		count := map[string]int{}
		for _, c := range s.seen() {
			if c.begun.After(from) {
				count[c.from]++
			}
		}
		done := 0
		for _, have := range count {
			if have >= n {
				done++
			}
		}
		if done < s.workers {
			return fmt.Errorf("only %d of %d workers have made %d connects", done, s.workers, n)
		}
		return nil
	})
}
