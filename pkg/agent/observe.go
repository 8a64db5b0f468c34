package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
)

// retryPort is how often an agent that is to take over from another one looks
// whether the operators' port is free.
const retryPort = 200 * time.Millisecond

// observe opens the admin socket and the operators' port. Beside an agent that
// still runs, which this one is to follow, the port is taken when it ends.
func (a *Agent) observe(ctx context.Context, g *errgroup.Group) error {
	o, other := a.cfg.Agent.Observe, false
	if o.AdminSocket != "" {
		l, older, err := observe.TakeOver(o.AdminSocket, a.cfg.Generation)
		if err != nil {
			return fmt.Errorf("admin %w; choose another with observe.adminSocket (--admin-socket)", err)
		}
		if other = older; other {
			a.log.Info("another agent runs on this node: taking over from it")
		}
		g.Go(func() error {
			return observe.Serve(ctx, l, observe.AdminHandler(a.ready, observe.Pages{
				"/status": func() any { return a.Status() },
				"/conns":  func() any { return a.ConnStatuses() },
			}))
		})
	}
	if o.Address == "" {
		return nil
	}
	l, err := net.Listen("tcp", o.Address)
	switch {
	case err == nil:
	case other && errors.Is(err, syscall.EADDRINUSE):
		a.log.WithField("address", o.Address).Info("the operators' port is the other agent's until that ends")
	default:
		return fmt.Errorf("operator port: %w; choose another with observe.address (--observe-address)", intercept.ExplainListen(err))
	}
	g.Go(func() error { return a.operators(ctx, l) })
	return nil
}

// operators serves the operators' port, on l first, while this agent is the one
// to answer there: it is the successor's when that has taken over.
func (a *Agent) operators(ctx context.Context, l net.Listener) error {
	for ctx.Err() == nil {
		leading, resign := context.WithCancel(ctx)
		resigned := make(chan struct{})
		go func() {
			defer close(resigned)
			defer resign()
			a.whileLeading(leading)
		}()
		err := a.serveOperators(leading, l)
		l = nil // it is closed; the next one is a new one
		resign()
		<-resigned
		if err != nil {
			return err
		}
		for leads, changed := a.role.leads(); !leads; leads, changed = a.role.leads() {
			select {
			case <-changed:
			case <-ctx.Done():
				return nil
			}
		}
	}
	return nil
}

func (a *Agent) serveOperators(ctx context.Context, l net.Listener) error {
	l, err := a.operatorPort(ctx, l)
	if err != nil || l == nil {
		return err
	}
	return observe.Serve(ctx, l, observe.OperatorHandler(a.ready, a.cfg.Registry))
}

// whileLeading returns when another agent has taken over, or ctx ends.
func (a *Agent) whileLeading(ctx context.Context) {
	for {
		leads, changed := a.role.leads()
		if !leads {
			return
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
	}
}

// operatorPort returns l, or waits for the port that another agent still has.
// It returns nil when ctx ends first.
func (a *Agent) operatorPort(ctx context.Context, l net.Listener) (net.Listener, error) {
	tick := time.NewTicker(retryPort)
	defer tick.Stop()
	for l == nil {
		select {
		case <-ctx.Done():
			return nil, nil
		case <-tick.C:
		}
		var err error
		if l, err = net.Listen("tcp", a.cfg.Agent.Observe.Address); err != nil && !errors.Is(err, syscall.EADDRINUSE) {
			return nil, fmt.Errorf("operator port: %w", err)
		}
	}
	return l, nil
}
