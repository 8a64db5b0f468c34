package netns

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"time"
)

// Probe says from where which address is tried.
type Probe struct {
	From *Host
	To   netip.AddrPort
}

// Reach reports whether a TCP connection can be made within the time.
func (p Probe) Reach(within time.Duration) error {
	ctx, cancel := context.WithTimeout(context.Background(), within)
	defer cancel()
	c, err := p.From.Dial(ctx, "tcp", p.To.String())
	if err != nil {
		return fmt.Errorf("netns: %s cannot reach %s: %w", p.From.Label, p.To, err)
	}
	return c.Close()
}

// CutOff proves that an obstacle is what keeps every probe from its
// destination: without it all of them are seen to connect, then raise is
// called, and then none may connect within the time. The error says which of
// these did not hold.
func CutOff(probes []Probe, within time.Duration, raise func() error) error {
	for _, p := range probes {
		if err := p.Reach(5 * time.Second); err != nil {
			return fmt.Errorf("before the obstacle: %w", err)
		}
	}
	if err := raise(); err != nil {
		return fmt.Errorf("raising the obstacle: %w", err)
	}
	errs := make(chan error, len(probes))
	for _, p := range probes {
		go func() {
			if p.Reach(within) == nil {
				errs <- fmt.Errorf("netns: %s still reaches %s behind the obstacle", p.From.Label, p.To)
				return
			}
			errs <- nil
		}()
	}
	var all []error
	for range probes {
		all = append(all, <-errs)
	}
	return errors.Join(all...)
}
