package observe

import (
	"bytes"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// maxWaiting bounds the bytes that a Patient keeps for a reader that is slow.
const maxWaiting = 1 << 20

// Patient is a writer of lines that never waits: for a log whose reader has
// stopped to read, as a full pipe, must not stop who writes it. What does not
// fit is dropped, counted, and told of when the reader is back. Its methods may
// be called concurrently.
type Patient struct {
	to      io.Writer
	dropped prometheus.Counter

	mu      sync.Mutex
	waiting bytes.Buffer
	lost    int
	closed  bool
	more    chan struct{} // something waits, or it is closed
	done    chan struct{}
}

// NewPatient begins to write to w, in a goroutine of its own. The metric counts
// dropped lines; nil leaves it unregistered.
func NewPatient(w io.Writer, reg prometheus.Registerer) *Patient {
	p := &Patient{to: w, more: make(chan struct{}, 1), done: make(chan struct{})}
	p.dropped = prometheus.NewCounter(prometheus.CounterOpts{
		Name: "kasway_agent_log_dropped_total",
		Help: "Lines of the log that were dropped because nobody read it.",
	})
	if reg != nil {
		reg.MustRegister(p.dropped)
	}
	go p.run()
	return p
}

// Write implements io.Writer, with whole lines. It never fails.
func (p *Patient) Write(line []byte) (int, error) {
	p.mu.Lock()
	if p.closed || p.waiting.Len()+len(line) > maxWaiting {
		p.lost++
		p.dropped.Inc()
	} else {
		p.waiting.Write(line)
	}
	p.mu.Unlock()
	p.wake()
	return len(line), nil
}

func (p *Patient) wake() {
	select {
	case p.more <- struct{}{}:
	default: // it is awake
	}
}

func (p *Patient) run() {
	defer close(p.done)
	for range p.more {
		for {
			text, closed := p.take()
			if len(text) == 0 && closed {
				return
			}
			if len(text) == 0 {
				break
			}
			_, _ = p.to.Write(text) // there is nowhere to tell of it
		}
	}
}

// take returns what waits, and what was lost before it.
func (p *Patient) take() (text []byte, closed bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	text = bytes.Clone(p.waiting.Bytes())
	p.waiting.Reset()
	if p.lost > 0 {
		text = fmt.Appendf(text, "%d lines of this log were dropped: nobody read it\n", p.lost)
		p.lost = 0
	}
	return text, p.closed
}

// Close waits for what waits to be written, for so long at most. Whatever is
// written after it is dropped.
func (p *Patient) Close(within time.Duration) {
	p.mu.Lock()
	p.closed = true
	p.mu.Unlock()
	p.wake()
	select {
	case <-p.done:
	case <-time.After(within):
	}
}
