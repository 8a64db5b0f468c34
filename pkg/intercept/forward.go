package intercept

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	mrand "math/rand/v2"
	"net"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

// ForwardConfig is what a Forwarder needs.
type ForwardConfig struct {
	// Dial opens the way to the target.
	Dial dial.Func
	// Gates holds connections while there is no way.
	Gates *Gates
	// Hold bounds how long one connection is held, from when it was taken;
	// 0: none is.
	Hold time.Duration
	// DialTimeout bounds one attempt of Dial; 0: DefaultDialTimeout.
	DialTimeout time.Duration
	// Who finds out who the clients are; nil: nobody is known.
	Who *Who
	// Conns gets every connection while it is carried; nil: nobody looks.
	Conns   *Conns
	Log     logrus.FieldLogger
	Metrics *Metrics
}

// DefaultDialTimeout is longer than the server takes to try several upstreams,
// and shorter than what clients of a KAS wait for (30 s).
const DefaultDialTimeout = 15 * time.Second

// Forwarder carries taken connections: each is described, held if need be,
// dialled and then piped to its end.
type Forwarder struct{ cfg ForwardConfig }

// NewForwarder makes a Forwarder; its Handle is a Handler.
func NewForwarder(cfg ForwardConfig) *Forwarder {
	if cfg.DialTimeout == 0 {
		cfg.DialTimeout = DefaultDialTimeout
	}
	if cfg.Conns == nil {
		cfg.Conns = NewConns()
	}
	if cfg.Who == nil {
		cfg.Who = NewWho(WhoConfig{Metrics: cfg.Metrics})
	}
	cfg.Metrics = orUnregistered(cfg.Metrics)
	return &Forwarder{cfg: cfg}
}

// Handle carries t to its end. If it cannot, the client sees a reset.
func (f *Forwarder) Handle(ctx context.Context, t Taken) {
	start := time.Now()
	client := dial.NewTCP(t.Conn)
	target, who, err := f.describe(t)
	log := f.cfg.Log.WithFields(observe.Who{
		Workload: target.Workload, Command: target.Command, PID: target.PID, UID: target.UID, UIDKnown: target.UIDKnown,
	}.Fields(logrus.Fields{
		observe.FieldConn: target.ID, observe.FieldTarget: target.Name, observe.FieldClient: target.Client,
	}))
	if err != nil {
		log.WithError(err).Debug("original destination is not known")
	}
	ctx, abort := context.WithCancelCause(ctx)
	defer abort(nil)
	carried := f.cfg.Conns.begin(client, target, who, start, abort)
	defer f.cfg.Conns.end(carried)
	far, err := f.open(ctx, carried)
	if err != nil {
		if ctx.Err() != nil {
			err = stopCause(ctx)
		}
		f.cfg.Metrics.refused.WithLabelValues(reason(err)).Inc()
		client.Abort(err)
		log.WithField(observe.FieldReason, reason(err)).WithError(err).Debug("connection refused")
		return
	}
	carried.state.Store(ConnOpen)
	log.WithField(observe.FieldOriginal, target.Original).Debug("connection opened")
	stop := context.AfterFunc(ctx, func() {
		cause := stopCause(ctx)
		client.Abort(cause)
		far.Abort(cause)
	})
	r := dial.Pipe(client, far)
	if !stop() && r.Err != nil {
		r.Err = stopCause(ctx) // what Pipe met is only how it showed
	}
	f.cfg.Metrics.bytes.WithLabelValues("to_target").Add(float64(r.FromA))
	f.cfg.Metrics.bytes.WithLabelValues("to_client").Add(float64(r.FromB))
	log = log.WithFields(logrus.Fields{"sent": r.FromA, "received": r.FromB, "lasted": time.Since(start).Round(time.Millisecond)})
	if r.Err != nil {
		log = log.WithField(observe.FieldReason, reason(r.Err)).WithError(r.Err)
	}
	log.Debug("connection ended")
}

// stopCause is why a connection was ended from outside of it.
func stopCause(ctx context.Context) error {
	if err := context.Cause(ctx); !errors.Is(err, context.Canceled) {
		return err
	}
	return ErrStopped // the Server's context has no cause of its own
}

// describe is what is known of the client. An error is about the original
// destination alone, which decides nothing.
func (f *Forwarder) describe(t Taken) (dial.Target, Client, error) {
	who, err := f.cfg.Who.find(t)
	target := dial.Target{ID: newID(), Name: t.Target, Client: t.Peer, Pod: !t.FromHost}
	who.describe(&target)
	return target, who, err
}

// open waits for the gate and dials. A dial that finds the way closed before
// the gate has learned of it is repeated while the connection may be held.
func (f *Forwarder) open(ctx context.Context, l *Carried) (dial.Conn, error) {
	c, t, deadline := l.client.TCPConn, l.Target, l.Since.Add(f.cfg.Hold)
	for {
		l.state.Store(ConnHeld)
		if err := f.hold(ctx, c, t.Name, deadline); err != nil {
			return nil, err
		}
		l.state.Store(ConnDialling)
		far, err := f.dial(ctx, c, t)
		noWay := errors.Is(err, dial.ErrNoLink) || errors.Is(err, dial.ErrNoUpstream)
		if err == nil || !noWay || !time.Now().Before(deadline) {
			return far, err
		}
		if werr := f.pause(ctx, c, deadline); werr != nil {
			return nil, errors.Join(werr, err)
		}
	}
}

func (f *Forwarder) hold(ctx context.Context, c *net.TCPConn, target string, deadline time.Time) error {
	if f.cfg.Gates.State(target) != Held {
		return f.cfg.Gates.Wait(ctx, target, deadline)
	}
	ctx, stop, err := watchClient(ctx, c, true)
	if err != nil {
		return err
	}
	defer stop()
	return f.cfg.Gates.Wait(ctx, target, deadline)
}

func (f *Forwarder) dial(ctx context.Context, c *net.TCPConn, t dial.Target) (dial.Conn, error) {
	ctx, stop, err := watchClient(ctx, c, false)
	if err != nil {
		return nil, err
	}
	defer stop()
	timed, cancel := context.WithTimeout(ctx, f.cfg.DialTimeout)
	defer cancel()
	far, err := f.cfg.Dial(timed, t)
	if err != nil && errors.Is(context.Cause(ctx), ErrClientGone) {
		return nil, errors.Join(ErrClientGone, err)
	}
	return far, dial.Classify(err)
}

// pause is how long a failed dial waits for the next: long enough for the gate
// to learn that the way is closed, and different for each of many.
func (f *Forwarder) pause(ctx context.Context, c *net.TCPConn, deadline time.Time) error {
	ctx, stop, err := watchClient(ctx, c, true)
	if err != nil {
		return err
	}
	defer stop()
	d := 250*time.Millisecond + mrand.N(250*time.Millisecond)
	t := time.NewTimer(min(d, time.Until(deadline)))
	defer t.Stop()
	select {
	case <-t.C:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func newID() string {
	var b [8]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}
