// Package agent is the story of a node's agent: it starts links, listeners and
// diversion in this order, follows changes of addresses and health, and stops
// in reverse. It knows neither a concrete mode nor the tunnel.
package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// stopGrace is what taken connections get to end by themselves when the agent
// stops. Those of KAS clients never do, and the node's new connects are refused
// meanwhile, so it is only for requests that are under way.
const stopGrace = time.Second

// retryApply is when a change that could not be applied is tried again.
const retryApply = time.Second

// Links is the way to the servers, as far as the agent looks at it.
type Links interface {
	// Run keeps the links until ctx ends.
	Run(ctx context.Context) error
	// Carries reports whether a target can be reached at this moment.
	Carries(target string) bool
	// Changed is closed at the next change of any answer of Carries.
	Changed() <-chan struct{}
	// Status lists the links, for people.
	Status() []LinkStatus
}

// Modes makes the candidates: those to try in order, and all the others.
type Modes func(Parts) (try, others []intercept.Candidate)

// Parts is what modes share with the agent.
type Parts struct {
	Listeners *intercept.Listeners
	Addresses *intercept.NodeAddresses
	Metrics   *intercept.Metrics
	Log       logrus.FieldLogger
}

// Config is what Run needs.
type Config struct {
	Agent config.Agent
	// Generation names the kernel objects of this process.
	Generation string
	// Dial opens a way to a target: the guard in front of the tunnel.
	Dial  dial.Func
	Links Links
	Own   *intercept.OwnSockets
	// AskUID looks up the user of host clients; only rules about uids need it.
	AskUID   bool
	Modes    Modes
	Registry *prometheus.Registry
	Log      logrus.FieldLogger
}

// Agent is one running agent.
type Agent struct {
	cfg     Config
	log     logrus.FieldLogger
	start   time.Time
	metrics *metrics

	addresses *intercept.NodeAddresses
	listeners *intercept.Listeners
	server    *intercept.Server
	gates     *intercept.Gates
	selfTest  *intercept.SelfTest
	resolver  *rules.Resolver
	resolved  chan struct{} // a name has other addresses

	placed  placement
	targets []rules.Target // with the self-test
	ports   map[string]rules.Ports
	choice  intercept.Choice
	view    view
}

// Run runs an agent until ctx ends, and returns nil then. An error means that
// it could not start, or can work no longer.
func Run(ctx context.Context, cfg Config) error {
	a := &Agent{cfg: cfg, log: cfg.Log, start: time.Now(), resolved: make(chan struct{}, 1)}
	a.metrics = newMetrics(cfg.Registry)
	if err := cfg.Own.Check(); err != nil {
		return err
	}
	closers, err := a.build()
	defer func() {
		for _, c := range closers {
			c()
		}
	}()
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	g, gctx := errgroup.WithContext(ctx)
	if err := a.observe(gctx, g); err != nil {
		cancel()
		return errors.Join(err, g.Wait())
	}
	g.Go(func() error { a.resolver.Run(gctx); return nil })
	// Links outlive ctx: what was taken is carried while the agent stops.
	linkCtx, stopLinks := context.WithCancel(context.WithoutCancel(ctx))
	linksDone := make(chan error, 1)
	go func() { linksDone <- cfg.Links.Run(linkCtx) }()

	g.Go(func() error { return a.divert(gctx) })
	err = g.Wait()
	stopLinks()
	return errors.Join(err, <-linksDone)
}

// build makes what the stories below use, and returns how to undo it.
func (a *Agent) build() (closers []func(), err error) {
	c := a.cfg.Agent
	m := intercept.NewMetrics(a.cfg.Registry)
	peers, err := intercept.NewPeers(intercept.PeersConfig{
		Uplinks: c.Intercept.Uplinks, Own: a.cfg.Own, Servers: a.serverAddresses,
	})
	if err != nil {
		return closers, err
	}
	closers = append(closers, peers.Close)
	var uids *intercept.UIDs
	if a.cfg.AskUID {
		if uids, err = intercept.NewUIDs(); err != nil {
			return closers, err
		}
		closers = append(closers, func() { _ = uids.Close() })
	}
	hold := c.Intercept.Hold
	if c.Intercept.WhenUnreachable == config.WhenUnreachableRefuse {
		hold = 0
	}
	a.gates = intercept.NewGates(c.Intercept.MaxConnections, m)
	a.selfTest = intercept.NewSelfTest()
	forward := intercept.NewForwarder(intercept.ForwardConfig{
		Dial: a.cfg.Dial, Gates: a.gates, Hold: hold, UIDs: uids, Log: a.log, Metrics: m,
	})
	a.server = intercept.NewServer(intercept.ServerConfig{
		MaxConnections: c.Intercept.MaxConnections, Admit: peers.Admit,
		Handle: a.selfTest.Wrap(forward.Handle), Log: a.log, Metrics: m,
	})
	a.addresses = intercept.NewNodeAddresses(c.Intercept.StateDir, a.log)
	if a.placed, err = place(c.Intercept, a.addresses); err != nil {
		return closers, err
	}
	a.listeners = intercept.NewListeners(intercept.ListenersConfig{
		Addresses: a.placed.listen, Fixed: a.placed.fixed, Server: a.server,
	})
	a.resolver = rules.NewResolver(rules.ResolverConfig{
		Targets: a.placed.diverted(c.Targets), Interval: c.Intercept.ResolveInterval,
		Changed: func() {
			select {
			case a.resolved <- struct{}{}:
			default: // one is pending already
			}
		},
		Log: a.log, Metrics: rules.NewMetrics(a.cfg.Registry),
	})
	a.targets = append(a.targets, c.Targets...)
	a.targets = append(a.targets, rules.Target{Name: intercept.SelfTestName})
	try, others := a.cfg.Modes(Parts{Listeners: a.listeners, Addresses: a.addresses, Metrics: m, Log: a.log})
	a.view.try, a.view.others, a.view.metrics = try, others, m
	return closers, nil
}

// observe opens the operators' port and the admin socket.
func (a *Agent) observe(ctx context.Context, g *errgroup.Group) error {
	o := a.cfg.Agent.Observe
	if o.Address != "" {
		l, err := net.Listen("tcp", o.Address)
		if err != nil {
			return fmt.Errorf("operator port: %w (observe.address, --observe-address)", err)
		}
		g.Go(func() error {
			return observe.Serve(ctx, l, observe.OperatorHandler(a.ready, a.cfg.Registry))
		})
	}
	if o.AdminSocket != "" {
		l, err := observe.ListenSocket(o.AdminSocket)
		if err != nil {
			return fmt.Errorf("admin %w (observe.adminSocket, --admin-socket)", err)
		}
		g.Go(func() error {
			return observe.Serve(ctx, l, observe.AdminHandler(a.ready, func() any { return a.Status() }))
		})
	}
	return nil
}

// divert opens the listeners, chooses the mode, and keeps what is installed in
// step with the world until ctx ends; then it undoes all that in reverse.
func (a *Agent) divert(ctx context.Context) (err error) {
	defer func() { err = errors.Join(err, a.shutdown(ctx)) }()
	if err := a.addresses.Ensure(a.placed.addresses...); err != nil {
		return err
	}
	if a.ports, err = a.listeners.Set(ctx, a.targets); err != nil {
		return err
	}
	changed := a.cfg.Links.Changed()
	state := a.state()
	a.open(state)
	choice, err := intercept.Choose(ctx, intercept.ChooseConfig{
		Try: a.view.try, Others: a.view.others, State: state, Prove: a.selfTest.Prove,
		Log: a.log, Metrics: a.view.metrics,
	})
	if err != nil {
		a.view.setChoice(choice, state)
		return err
	}
	a.choice = choice
	a.view.setChoice(choice, state)
	a.log.WithFields(logrus.Fields{observe.FieldMode: choice.Name, "generation": a.cfg.Generation, "targets": len(a.cfg.Agent.Targets)}).
		Info("diverting")
	return a.follow(ctx, changed, state)
}

// follow applies every change.
func (a *Agent) follow(ctx context.Context, changed <-chan struct{}, applied rules.State) error {
	var retry <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-a.resolved:
		case <-changed:
		case <-retry:
		}
		// A new channel first, so that no change is missed.
		changed, retry = a.cfg.Links.Changed(), nil
		state := a.state()
		a.open(state)
		if sameState(state, applied) {
			continue
		}
		if err := a.choice.Mode.Apply(ctx, state); err != nil {
			if ctx.Err() != nil {
				return nil
			}
			a.metrics.applyFailed.Inc()
			a.log.WithError(err).Error("what is diverted could not be changed: the former rules stay, trying again")
			retry = time.After(retryApply)
			continue
		}
		applied = state
		a.view.setState(state)
		a.log.WithField("entries", entries(state)).Info("what is diverted has changed")
	}
}

// shutdown undoes divert. The guard of a dead agent stays in force.
func (a *Agent) shutdown(ctx context.Context) error {
	var err error
	if a.choice.Mode != nil {
		err = a.choice.Mode.Close()
	}
	a.listeners.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	if serr := a.server.Shutdown(ctx); serr != nil && !errors.Is(serr, context.DeadlineExceeded) {
		err = errors.Join(err, serr)
	}
	return err
}
