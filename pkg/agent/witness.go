package agent

import (
	"context"
	"fmt"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
)

const (
	// proveEvery is how often the self-test is repeated, and proveAgain how soon
	// after a failure: two heartbeats later at the least.
	proveEvery = 2 * time.Second
	proveAgain = time.Second
	// beyondDoubt is how many failures in a row are believed in whatever else
	// there is to excuse them.
	beyondDoubt = 10
)

// witness repeats the self-test, which goes through all of the kernel that a
// client's connection goes through: it shows what is not damaged but overridden
// by others. It believes in two failures in a row while this process ran, or in
// many in any case.
type witness struct {
	prove func(context.Context) error
	// lateSince says whether a heartbeat has come late since then.
	lateSince func(time.Time) bool
	cancel    context.CancelFunc
	done      chan struct{}
	// alarm is called when there is testimony.
	alarm func()

	mu       sync.Mutex
	failures int
	first    time.Time // when the first of them began
	err      error
}

// newWitness starts one.
func newWitness(prove func(context.Context) error, lateSince func(time.Time) bool, alarm func()) *witness {
	ctx, cancel := context.WithCancel(context.Background())
	w := &witness{prove: prove, lateSince: lateSince, cancel: cancel, done: make(chan struct{}), alarm: alarm}
	go func() {
		defer close(w.done)
		w.run(ctx)
	}()
	return w
}

func (w *witness) stop() {
	w.cancel()
	<-w.done
}

func (w *witness) run(ctx context.Context) {
	next := time.NewTimer(proveEvery)
	defer next.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-next.C:
		}
		begun := time.Now()
		err := w.prove(ctx)
		if ctx.Err() != nil {
			return
		}
		if w.take(err, begun); err != nil {
			next.Reset(proveAgain)
		} else {
			next.Reset(proveEvery)
		}
	}
}

// take judges one attempt. Where this process did not run for a while the kernel
// was right to take it for dead.
func (w *witness) take(err error, begun time.Time) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if err == nil {
		w.failures, w.err = 0, nil
		return
	}
	if w.failures == 0 {
		w.first = begun
	}
	w.failures++
	starved := w.lateSince(w.first.Add(-intercept.HeartbeatTimeout)) && w.failures < beyondDoubt
	if w.failures < 2 || starved {
		return
	}
	w.err = err
	w.alarm()
}

// testimony is why connections are not diverted; nil: they are, as far as is
// known.
func (w *witness) testimony() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.err == nil {
		return nil
	}
	return fmt.Errorf("not diverted any more: %w", w.err)
}

// forget begins anew, as after a repair.
func (w *witness) forget() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.failures, w.err = 0, nil
}
