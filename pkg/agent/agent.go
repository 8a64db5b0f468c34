// Package agent is the story of a node's agent: it starts links, listeners and
// diversion in this order, follows changes of addresses and health, and stops
// in reverse. It knows neither a concrete mode nor the tunnel.
package agent

import (
	"context"
	"errors"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/pkg/workload"
)

// ownDescriptors is more than an agent needs besides those of connections.
const ownDescriptors = 128

// stopGrace is what taken connections get to end by themselves when the agent
// stops. Those of KAS clients never do, and the node's new connects are refused
// meanwhile, so it is only for requests that are under way.
const stopGrace = time.Second

// lookAfterAddresses is how often it is looked whether they are still there.
const lookAfterAddresses = 2 * time.Second

// retryApply is when a change that could not be applied is tried again.
const retryApply = time.Second

// firstNames is what the first look at the targets' names may take. The guard
// of the agent before refuses what they led to; ours does so only if we know it
// too, but a node whose DNS is not there yet must not wait for it.
const firstNames = time.Second

// Links is the way to the servers, as far as the agent looks at it.
type Links interface {
	// Run keeps the links until ctx ends; an error before ends the agent.
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
	// NeedWho says that the guard asks who the host's clients are: without a
	// way to find out the agent does not start.
	NeedWho bool
	// Workloads finds what runs in a cgroup; nil: nobody knows.
	Workloads *workload.Index
	Modes     Modes
	// Lookup resolves the targets' host names; nil: as the node does.
	Lookup   rules.Lookup
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
	conns     *intercept.Conns // what is carried now
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
	presence, err := intercept.Announce(cfg.Generation)
	if err != nil {
		return err
	}
	defer func() { _ = presence.Close() }() // it ends with the process at the latest
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
	// Links outlive ctx: what was taken is carried while the agent stops.
	linkCtx, stopLinks := context.WithCancel(context.WithoutCancel(ctx))
	linksDone := make(chan error, 1)
	go func() {
		err := cfg.Links.Run(linkCtx)
		if err != nil {
			cancel() // nothing can be carried any more
		}
		linksDone <- err
	}()
	g.Go(func() error {
		a.lookUp(gctx)
		g.Go(func() error { a.resolver.Run(gctx); return nil })
		return a.divert(gctx)
	})
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
	if gone, err := intercept.MissingUplinks(c.Intercept.Uplinks); err == nil && len(gone) > 0 {
		a.log.WithField("interfaces", gone).Warn("intercept.uplinks names interfaces that are not there: uplinks are found out from the routes as well")
	}
	who, err := a.who(m)
	if err != nil {
		return closers, err
	}
	closers = append(closers, who.Close)
	hold := c.Intercept.Hold
	if c.Intercept.WhenUnreachable == config.WhenUnreachableRefuse {
		hold = 0
	}
	most := a.connections()
	a.gates = intercept.NewGates(most, m)
	a.conns = intercept.NewConns()
	a.selfTest = intercept.NewSelfTest()
	forward := intercept.NewForwarder(intercept.ForwardConfig{
		Dial: a.cfg.Dial, Gates: a.gates, Hold: hold, Who: who, Conns: a.conns, Log: a.log, Metrics: m,
	})
	a.server = intercept.NewServer(intercept.ServerConfig{
		MaxConnections: most, Admit: peers.Admit,
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
		Targets: a.placed.diverted(c.Targets), Interval: c.Intercept.ResolveInterval, Lookup: a.cfg.Lookup,
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
	a.view.try, a.view.others, a.view.metrics = telling(who, try), others, m
	return closers, nil
}

// connections is how many may be carried: as many as configured, if the process
// may have the descriptors for them. Without any left the kubelet could not be
// served, whatever places are kept for it.
func (a *Agent) connections() int {
	want := a.cfg.Agent.Intercept.MaxConnections
	var limit unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &limit); err != nil || limit.Cur >= uint64(want)+ownDescriptors {
		return want
	}
	most := max(int(limit.Cur)-ownDescriptors, 1)
	a.log.WithFields(logrus.Fields{"configured": want, "allowed": most}).
		Warnf("fewer connections are carried than configured: this process may have %d file descriptors (raise ulimit -n, or LimitNOFILE= of its unit)", limit.Cur)
	return most
}

// lookUp resolves the targets' names for the first time.
func (a *Agent) lookUp(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, firstNames)
	defer cancel()
	a.resolver.Resolve(ctx)
}

// divert opens the listeners, chooses the mode, and keeps what is installed in
// step with the world until ctx ends; then it undoes all that in reverse.
func (a *Agent) divert(ctx context.Context) (err error) {
	defer func() {
		if ctx.Err() != nil {
			err = nil // what being told to stop has broken off has not failed
		}
		err = errors.Join(err, a.shutdown(ctx))
	}()
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
		return err
	}
	a.choice = choice
	a.view.setChoice(choice, state)
	a.log.WithFields(logrus.Fields{observe.FieldMode: choice.Name, "generation": a.cfg.Generation, "targets": len(a.cfg.Agent.Targets)}).
		Info("diverting")
	return a.follow(ctx, changed, state)
}

// follow applies every change. After a failure nobody knows what is installed,
// so the wanted state is applied even if it is the former one again.
func (a *Agent) follow(ctx context.Context, changed <-chan struct{}, applied rules.State) error {
	var failing error
	look := time.NewTicker(lookAfterAddresses)
	defer look.Stop()
	for {
		var retry <-chan time.Time
		if failing != nil {
			retry = time.After(retryApply)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-a.resolved:
		case <-changed:
		case <-retry:
		case <-look.C:
			a.lookAfter()
			continue
		}
		// A new channel first, so that no change is missed.
		changed = a.cfg.Links.Changed()
		state := a.state()
		a.open(state)
		if failing == nil && sameState(state, applied) {
			continue
		}
		err := a.choice.Mode.Apply(ctx, state)
		if ctx.Err() != nil {
			return nil
		}
		a.report(state, err, failing)
		if failing = err; err == nil {
			applied = state
		}
	}
}

// lookAfter puts back the node's addresses if somebody has taken them away: a
// diverted connection would be waiting for an answer from nowhere.
func (a *Agent) lookAfter() {
	err := a.addresses.Ensure(a.placed.addresses...)
	if was := a.view.setAddresses(err); err != nil && was == nil {
		a.log.WithError(err).Error("the node's addresses cannot be kept: pods are not served")
	}
}

// report tells of a change that was applied, or not; it was is what the attempt
// before has met.
func (a *Agent) report(s rules.State, err, was error) {
	if err == nil {
		a.view.setState(s)
		a.log.WithField("entries", entries(s)).Info("what is diverted has changed")
		return
	}
	a.view.setFailed(err)
	a.metrics.applyFailed.Inc()
	log := a.log.WithError(err)
	if was != nil {
		log.Debug("what is diverted still cannot be changed")
		return
	}
	log.Error("what is diverted could not be changed: the former rules stay, trying again every second")
}

// shutdown undoes divert. The guard of a dead agent stays in force.
func (a *Agent) shutdown(ctx context.Context) error {
	var err error
	if a.choice.Mode != nil {
		if err = a.choice.Mode.Close(); err == nil {
			a.log.WithField(observe.FieldMode, a.choice.Name).Info(afterwards(a.cfg.Agent.Intercept.WhenDown))
		}
	}
	a.listeners.Close()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopGrace)
	defer cancel()
	switch serr := a.server.Shutdown(ctx); {
	case errors.Is(serr, context.DeadlineExceeded):
		a.log.Info("connections that had not ended were reset")
	case serr != nil:
		err = errors.Join(err, serr)
	}
	return err
}

// afterwards says what clients meet when the agent has stopped.
func afterwards(w rules.WhenDown) string {
	if w == rules.Direct {
		return "no longer diverting: connects pass untouched"
	}
	return "no longer diverting: connects are refused until an agent runs again, or after kasway-agent cleanup pass untouched"
}
