package link

import (
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"time"
)

// maxFlight bounds the memory of a direction, whatever its rate and delay.
const maxFlight = 256 << 20

// packet is on its way and arrives when due.
type packet struct {
	due  time.Time
	data []byte
}

// direction carries packets one way: read takes them from the sending host's
// device, write delivers them to the other's.
type direction struct {
	cfg    Config
	chance *rand.Rand // read's own

	mu     sync.Mutex
	moved  sync.Cond // packets came, or closed
	flight []packet  // in the order in which they are due
	bytes  int       // in flight
	idle   time.Time // when the last packet taken has been sent at Rate
	counts Counts
	down   bool
	closed bool
	done   chan struct{}
}

func newDirection(cfg Config, n uint64) *direction {
	d := &direction{cfg: cfg, chance: rand.New(rand.NewPCG(cfg.Seed, n)), done: make(chan struct{})}
	d.moved.L = &d.mu
	return d
}

func (d *direction) read(from *os.File) {
	buf := make([]byte, largest)
	for {
		n, err := from.Read(buf)
		if err != nil {
			return // closed, or the device went with its host
		}
		d.take(buf[:n], time.Now())
	}
}

// take decides what becomes of a packet that is sent now.
func (d *direction) take(data []byte, now time.Time) {
	lost := d.cfg.Loss > 0 && d.chance.Float64() < d.cfg.Loss
	d.mu.Lock()
	defer d.mu.Unlock()
	size := len(data) - headerSize
	switch {
	case d.down:
		d.counts.Cut++
		return
	case lost:
		d.counts.Lost++
		return
	case d.bytes+size > maxFlight, d.cfg.Rate > 0 && d.waiting(now)+size > d.cfg.Queue:
		d.counts.Dropped++
		return
	}
	sent := now
	if d.cfg.Rate > 0 {
		if d.idle.Before(now) {
			d.idle = now
		}
		d.idle = d.idle.Add(time.Duration(float64(size*8) / d.cfg.Rate * float64(time.Second)))
		sent = d.idle
	}
	d.flight = append(d.flight, packet{sent.Add(d.cfg.Delay), slices.Clone(data)})
	d.bytes += size
	d.counts.Packets++
	d.counts.Bytes += uint64(size)
	d.moved.Signal()
}

// waiting is how many bytes have not been sent yet at Rate.
func (d *direction) waiting(now time.Time) int {
	return max(0, int(d.idle.Sub(now).Seconds()*d.cfg.Rate/8))
}

// write delivers each packet when it is due. A late wake-up delivers several
// at once and delays none that follow: due times do not depend on it.
func (d *direction) write(to *os.File) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		p, ok := d.next()
		if !ok {
			return
		}
		if wait := time.Until(p.due); wait > 0 {
			timer.Reset(wait)
			select {
			case <-timer.C:
			case <-d.done:
				return
			}
		}
		// A host whose device is down, or which has no memory left, loses it.
		_, _ = to.Write(p.data)
	}
}

// next waits for a packet; false says that the link is closed.
func (d *direction) next() (packet, bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.flight) == 0 && !d.closed {
		d.moved.Wait()
	}
	if d.closed {
		return packet{}, false
	}
	p := d.flight[0]
	d.flight[0] = packet{}
	d.flight = d.flight[1:]
	d.bytes -= len(p.data) - headerSize
	return p, true
}

func (d *direction) snapshot() Counts {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.counts
}

func (d *direction) setDown(down bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.down = down
	if down { // a cut also takes what was on the way
		d.counts.Cut += uint64(len(d.flight))
		d.flight, d.bytes = nil, 0
	}
}

func (d *direction) close() {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.closed {
		d.closed = true
		close(d.done)
		d.moved.Broadcast()
	}
}
