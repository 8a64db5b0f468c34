package server

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/upstream"
)

// server is one Run.
type server struct {
	log       logrus.FieldLogger
	upstreams *upstream.Set
	up        func() map[string]bool
	tunnel    Tunnel
	started   time.Time
	insecure  bool
	// why says why the server is not ready; nil: it is.
	why atomic.Pointer[string]

	agents net.Listener
	// operators and admin are nil where none is configured.
	operators, admin         net.Listener
	operatorsHTTP, adminHTTP http.Handler
}

// Run serves agents until ctx ends, and returns nil then. What can be wrong
// with the configuration (ErrConfig) is found before anything is opened. The
// server is ready as soon as it listens: a kube-apiserver may need the tunnel
// in order to become ready itself.
func Run(ctx context.Context, o Options) error {
	s, err := prepare(o)
	if err != nil {
		return err
	}
	if err := s.listen(o); err != nil {
		s.closeListeners()
		return err
	}
	return s.serve(ctx, o)
}

// prepare builds the chain guard(upstreams(guard(direct))) and the tunnel in
// front of it, and opens nothing.
func prepare(o Options) (*server, error) {
	t, err := transport(o)
	if err != nil {
		return nil, err
	}
	p, err := policy(o.Config)
	if err != nil {
		return nil, err
	}
	if p.Empty() {
		o.Log.Warn("no agent may reach anything: allow a destination (--allowed-destination) or grant an upstream (--grant)")
	}
	set, err := pools(o, p)
	if err != nil {
		return nil, err
	}
	s := &server{
		log: o.Log, upstreams: set, up: state(set, p), started: time.Now(), insecure: o.Config.Listen.InsecureAgents,
	}
	s.tunnel = o.NewTunnel(Carry{
		TLS:       t,
		Admit:     admit(s.insecure),
		Dial:      access.Guard(p, o.Log, access.NewServerMetrics(o.Registry), set.Dial),
		Upstreams: s.up,
		Changed:   set.Changed,
	})
	s.notReady("starting")
	s.operatorsHTTP = observe.OperatorHandler(s.ready, o.Registry)
	s.adminHTTP = observe.AdminHandler(s.ready, observe.Pages{"/status": s.status})
	return s, nil
}

func (s *server) notReady(why string) { s.why.Store(&why) }

func (s *server) ready() error {
	if why := s.why.Load(); why != nil {
		return errors.New(*why)
	}
	return nil
}

// listen opens every listener.
func (s *server) listen(o Options) (err error) {
	if s.agents, err = o.listenTCP(o.Config.Listen.Agents, "agents' port", "--listen"); err != nil {
		return err
	}
	if a := o.Config.Observe.Address; a != "" {
		if s.operators, err = o.listenTCP(a, "operators' port", "--observe-address"); err != nil {
			return err
		}
	}
	if path := o.Config.Observe.AdminSocket; path != "" {
		if s.admin, err = observe.ListenSocket(path); err != nil {
			return fmt.Errorf("admin %w (choose another with --admin-socket, or none with --admin-socket '')", err)
		}
	}
	return nil
}

// listenTCP is plain TCP: MPTCP, Go's default, only costs where no peer uses it.
func (o *Options) listenTCP(address, what, flag string) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	l, err := config.Listen(context.Background(), "tcp", address)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		if o.Explain != nil {
			err = o.Explain(err)
		}
		return nil, fmt.Errorf("%s: %w; choose another with %s", what, err, flag)
	case errors.Is(err, syscall.EACCES):
		return nil, fmt.Errorf("%s: %w: ports below 1024 need CAP_NET_BIND_SERVICE; choose another with %s", what, err, flag)
	case err != nil:
		return nil, fmt.Errorf("%s (%s): %w", what, flag, err)
	}
	return l, nil
}

func (s *server) closeListeners() {
	for _, l := range []net.Listener{s.agents, s.operators, s.admin} {
		if l != nil {
			_ = l.Close()
		}
	}
}

// serve is the order of start and stop: what shows and supports the tunnel
// starts before it and ends after it.
func (s *server) serve(ctx context.Context, o Options) error {
	around, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	var support sync.WaitGroup
	failed := make(chan error, 3)
	start := func(l net.Listener, h http.Handler) {
		if l == nil {
			return
		}
		support.Go(func() {
			if err := observe.Serve(around, l, h); err != nil {
				failed <- err
			}
		})
	}
	support.Go(func() { s.upstreams.Run(around) })
	start(s.operators, s.operatorsHTTP)
	start(s.admin, s.adminHTTP)
	served := make(chan struct{})
	go func() {
		defer close(served)
		if err := s.tunnel.Serve(s.agents); err != nil {
			failed <- fmt.Errorf("agents' port: %w", err)
		}
	}()
	s.why.Store(nil)
	s.announce(o)

	var err error
	select {
	case <-ctx.Done():
		s.log.Info("stopping")
	case err = <-failed:
		s.log.WithError(err).Error("stopping")
	}
	s.notReady("stopping")
	err = errors.Join(err, s.stop(served))
	end()
	support.Wait()
	return err
}

// stop ends the tunnel, within stopTimeout.
func (s *server) stop(served <-chan struct{}) error {
	stopped := make(chan struct{})
	go func() {
		defer close(stopped)
		s.tunnel.Stop()
		<-served
	}()
	timeout := time.NewTimer(stopTimeout)
	defer timeout.Stop()
	select {
	case <-stopped:
		return nil
	case <-timeout.C:
		return fmt.Errorf("links did not end within %v", stopTimeout)
	}
}

func (s *server) announce(o Options) {
	var operators net.Addr
	log := s.log.WithField(observe.FieldListener, s.agents.Addr().String())
	if s.operators != nil {
		operators = s.operators.Addr()
		log = log.WithField("operators", operators.String())
	}
	log.WithField("version", observe.Version).Info("ready")
	if o.Listening != nil {
		o.Listening(s.agents.Addr(), operators)
	}
}

// Status is what the admin socket shows.
type Status struct {
	Version   string          `json:"version"`
	Started   time.Time       `json:"started"`
	Ready     bool            `json:"ready"`
	Reason    string          `json:"reason,omitempty"` // why not ready
	Agents    string          `json:"agents"`           // address of the agents' port
	Insecure  bool            `json:"insecureAgents"`
	Upstreams map[string]bool `json:"upstreams"` // by target name: believed up
}

func (s *server) status() any {
	st := Status{
		Version: observe.Version, Started: s.started, Ready: true,
		Agents: s.agents.Addr().String(), Insecure: s.insecure, Upstreams: s.up(),
	}
	if err := s.ready(); err != nil {
		st.Ready, st.Reason = false, err.Error()
	}
	return st
}
