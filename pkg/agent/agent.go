// Package agent is the story of a node's agent: it starts links, listeners and
// diversion in this order, follows changes of addresses and health, and stops
// in reverse. It knows neither a concrete mode nor the tunnel.
package agent

import (
	"context"
	"errors"
	"os"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/pkg/workload"
)

// ownDescriptors is more than an agent needs besides those of connections.
const ownDescriptors = 128

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
	Lookup rules.Lookup
	// Reload gets something when a successor is to be started by Spawn; nil:
	// never.
	Reload <-chan os.Signal
	Spawn  func() (Child, error)
	// Manager may be nil. Succeeds says that this agent is what another one has
	// spawned: that tells the manager until this one has taken over.
	Manager  Manager
	Succeeds bool
	Registry *prometheus.Registry
	Log      logrus.FieldLogger

	// lookEvery is how often what is installed is looked after; 0: lookInterval.
	lookEvery time.Duration
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

	presence *intercept.Presence
	role     *role
	takeover *takeover
	// stamp is when this agent began to install itself; see intercept.Stamp.
	stamp      int64
	child      *child // what a reload has started; nil: nothing
	handedOver bool   // to child
	main       bool   // it is this agent that the manager hears

	placed  placement
	targets []rules.Target // with the self-test
	ports   map[string]rules.Ports
	choice  intercept.Choice
	view    view
}

// Run runs an agent until ctx ends, and returns nil then; also when another one
// that a reload has started has taken over. An error means that it could not
// start, or can work no longer.
func Run(ctx context.Context, cfg Config) error {
	if cfg.Manager == nil {
		cfg.Manager = func(...string) {}
	}
	a := &Agent{cfg: cfg, log: cfg.Log, start: time.Now(), resolved: make(chan struct{}, 1), main: !cfg.Succeeds}
	a.metrics = newMetrics(cfg.Registry)
	a.role = newRole(a.metrics)
	if err := cfg.Own.Check(); err != nil {
		return err
	}
	var err error
	if a.presence, err = intercept.Announce(cfg.Generation); err != nil {
		return err
	}
	defer func() { _ = a.presence.Close() }() // it ends with the process at the latest
	closers, err := a.build()
	defer func() {
		for _, c := range closers {
			c()
		}
	}()
	if err != nil {
		return err
	}
	// Told to stop, an agent may still have long to live: see standBy.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	g, gctx := errgroup.WithContext(life)
	if err := a.observe(gctx, g); err != nil {
		end()
		return errors.Join(err, g.Wait())
	}
	// Links outlive life: what was taken is carried while the agent stops.
	linkCtx, stopLinks := context.WithCancel(context.WithoutCancel(ctx))
	linksDone := make(chan error, 1)
	go func() {
		err := cfg.Links.Run(linkCtx)
		if err != nil {
			end() // nothing can be carried any more
		}
		linksDone <- err
	}()
	g.Go(func() error {
		defer end()
		told, stop := context.WithCancel(gctx)
		defer stop()
		defer context.AfterFunc(ctx, stop)()
		a.lookUp(told)
		g.Go(func() error { a.resolver.Run(gctx); return nil })
		return a.divert(told, gctx)
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
	a.takeover = newTakeover(a)
	a.listeners = intercept.NewListeners(intercept.ListenersConfig{
		Addresses: a.placed.listen, Fixed: a.placed.fixed, Transparent: c.Intercept.Mode == config.ModeTPROXY,
		Inherit: a.takeover.inherited, Server: a.server,
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
