package tunnel

import (
	"sync"
	"time"
)

// deadline is a point in time that can be moved and waited for. The zero value
// never expires.
type deadline struct {
	mu      sync.Mutex
	timer   *time.Timer
	expired chan struct{} // made on first use; closed once the time has come
}

// wait returns a channel that is closed when the deadline passes. After set it
// may be another one.
func (d *deadline) wait() <-chan struct{} {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.channel()
}

func (d *deadline) channel() chan struct{} {
	if d.expired == nil {
		d.expired = make(chan struct{})
	}
	return d.expired
}

// armed reports whether a deadline is set.
func (d *deadline) armed() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.timer != nil
}

func (d *deadline) set(t time.Time) {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	select {
	case <-d.channel():
		d.expired = make(chan struct{})
	default:
	}
	if t.IsZero() {
		return
	}
	// The timer closes the channel only while it is the current one: a set that
	// came first has replaced it.
	var self *time.Timer
	self = time.AfterFunc(time.Until(t), func() {
		d.mu.Lock()
		defer d.mu.Unlock()
		if d.timer == self {
			d.close()
		}
	})
	d.timer = self
	if !t.After(time.Now()) {
		d.close()
	}
}

func (d *deadline) close() {
	select {
	case <-d.expired:
	default:
		close(d.expired)
	}
}
