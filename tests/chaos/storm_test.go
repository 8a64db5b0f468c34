//go:build chaos

package chaos

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
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

// storm connects without end, with a worker or more for each client and address.
type storm struct {
	workers int
	cancel  context.CancelFunc
	wg      sync.WaitGroup
	mu      sync.Mutex
	all     []connect
	from    time.Time // since when since counts connects, by worker
	since   map[string]int
}

// fewest is how many workers a storm has at least.
const fewest = 6

func newStorm(clients []*netns.Host, to []netip.AddrPort) *storm {
	ctx, cancel := context.WithCancel(context.Background())
	s := &storm{since: map[string]int{}, cancel: cancel}
	for s.workers < fewest {
		for _, h := range clients {
			for _, a := range to {
				s.workers++
				name := fmt.Sprintf("worker %d, %s", s.workers, h.Label)
				s.wg.Go(func() { s.work(ctx, name, h, a) })
			}
		}
	}
	return s
}

func (s *storm) work(ctx context.Context, name string, h *netns.Host, to netip.AddrPort) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		c := one(h, to)
		c.from = name + " -> " + to.String()
		s.mu.Lock()
		s.all = append(s.all, c)
		s.note(c)
		s.mu.Unlock()
	}
}

// one connects once. The KAS sees the client's own address only if nobody stands
// between them.
func one(h *netns.Host, to netip.AddrPort) connect {
	c := connect{from: h.Label + " -> " + to.String(), begun: time.Now()}
	conn, err := h.DialWith(context.Background(), &net.Dialer{Timeout: 20 * time.Second}, "tcp", to.String())
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
		case who.Addr() == h.Addr4 || who.Addr() == h.Addr6:
			c.what = direct
		default:
			c.what = carried
		}
	}
	c.err, c.ended = err, time.Now()
	return c
}

// enough is how many connects a run has at least.
var enough = map[bool]int{false: 10_000, true: 100_000}[os.Getenv("FULL") == "1"]

// amounts waits until n connects have been made.
func (s *storm) amounts(n int) error {
	return netns.Poll(5*time.Minute, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.all) < n {
			return fmt.Errorf("only %d connects of %d", len(s.all), n)
		}
		return nil
	})
}

// add adds the connects of another storm.
func (s *storm) add(more []connect) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.all = append(s.all, more...)
}

func (s *storm) end() []connect {
	s.cancel()
	s.wg.Wait()
	return s.all
}

// proceed waits until every worker has ended n connects that began after from.
func (s *storm) proceed(from time.Time, n int) error {
	s.mu.Lock()
	s.from, s.since = from, map[string]int{}
	for _, c := range s.all {
		s.note(c)
	}
	s.mu.Unlock()
	return netns.Poll(30*time.Second, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		done := 0
		for _, have := range s.since {
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

// note counts c for proceed.
func (s *storm) note(c connect) {
	if c.begun.After(s.from) {
		s.since[c.from]++
	}
}

func summary(all []connect) string {
	count := map[string]int{}
	var longest time.Duration
	for _, c := range all {
		count[c.what]++
		longest = max(longest, c.blocked)
	}
	var parts []string
	for _, w := range []string{carried, refused, direct, broken, odd} {
		parts = append(parts, fmt.Sprintf("%d %s", count[w], w))
	}
	return fmt.Sprintf("%d connects: %s; longest connect %s", len(all), strings.Join(parts, ", "), longest.Round(time.Millisecond))
}
