package tunnel

import (
	"math/rand/v2"
	"time"
)

// backoff spreads reconnects with full jitter. It belongs to one goroutine.
type backoff struct{ failures int }

// next returns how long to wait after one more failure: a random time below a
// bound that doubles up to limit.
func (b *backoff) next(limit time.Duration) time.Duration {
	bound := limit
	// The shift cannot overflow: 100 ms doubled 16 times is far above any limit.
	if b.failures < 16 {
		bound = min(limit, backoffBase<<b.failures)
	}
	b.failures++
	return rand.N(bound + 1)
}

// held tells how long a link was up; only one that held starts over.
func (b *backoff) held(d time.Duration) {
	if d >= backoffHeld {
		b.failures = 0
	}
}
