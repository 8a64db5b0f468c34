package tunnel

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

func TestLinks_DialWithoutALink(t *testing.T) {
	l := NewLinks(LinksConfig{Servers: []string{"127.0.0.1:1"}})
	if _, err := l.Dial(t.Context(), kas()); !errors.Is(err, dial.ErrNoLink) {
		t.Fatal(err)
	}
	if l.Snapshot().Carries("kas") {
		t.Fatal("carries without a link")
	}
}

// What the server knows of its upstreams reaches the agent with the hello and
// at each change.
func TestLinks_UpstreamState(t *testing.T) {
	var (
		mu      sync.Mutex
		up      = map[string]bool{"kas": false, "other": true}
		changed = make(chan struct{})
	)
	set := func(v bool) {
		mu.Lock()
		defer mu.Unlock()
		up = map[string]bool{"kas": v}
		close(changed)
		changed = make(chan struct{})
	}
	b := newBench(t, newTarget(t).dial, setup{server: func(c *ServerConfig) {
		c.Upstreams = func() map[string]bool { mu.Lock(); defer mu.Unlock(); return up }
		c.UpstreamsChanged = func() <-chan struct{} { mu.Lock(); defer mu.Unlock(); return changed }
	}})
	s := b.links.Snapshot()
	if s.Carries("kas") || !s.Carries("other") || !s.Carries("unheard-of") {
		t.Fatalf("a new link carries the wrong targets: %v", s.Links[0].Targets)
	}
	for _, v := range []bool{true, false, true} {
		set(v)
		waitLinks(t, b.links, fmt.Sprintf("told that kas is %v", v), func(s Snapshot) bool { return s.Carries("kas") == v })
	}
	l := b.links.Snapshot().Links[0]
	if l.Server != b.addr || l.Version != "v0.test" || l.RTT <= 0 || l.Since.IsZero() {
		t.Fatalf("status lacks something: %+v", l)
	}
}

// Streams go to a link whose server can reach the target, then to the one with
// the fewest.
func TestLinks_Choice(t *testing.T) {
	down := newTarget(t)
	b := newBench(t, down.dial, setup{server: func(c *ServerConfig) {
		c.Upstreams = func() map[string]bool { return map[string]bool{"kas": false} }
	}, noLink: true})
	b.stopLinks()
	up := []*target{newTarget(t), newTarget(t)}
	servers := []string{b.addr}
	for _, g := range up {
		other := NewServer(ServerConfig{TLS: b.ca.serverTLS(), Dial: g.dial})
		lis := listen(t)
		go func() { _ = other.Serve(lis) }()
		t.Cleanup(other.Stop)
		servers = append(servers, lis.Addr().String())
	}
	links, _ := startLinks(t, LinksConfig{Servers: servers, TLS: b.ca.agentTLS()})
	waitUp(t, links)
	var conns []dial.Conn
	for range 10 {
		c, err := links.Dial(t.Context(), kas())
		if err != nil {
			t.Fatal(err)
		}
		conns = append(conns, c)
	}
	for _, g := range up {
		for range 5 {
			g.accept()
		}
	}
	if len(down.conns) != 0 {
		t.Fatal("the server that cannot reach the target was chosen")
	}
	for _, c := range conns {
		c.Abort(nil)
	}
}

// A link that loses its Control carries on what it has, and is replaced for
// what is new.
func TestLinks_ControlDeadStreamsLive(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	client, _ := b.open()
	far := g.accept()
	exchange(t, client, far)
	first, _ := b.links.links[0].current("")
	endControl(t, b.links)
	waitLinks(t, b.links, "replaced", func(s Snapshot) bool {
		now, _ := b.links.links[0].current("")
		return now != nil && now != first
	})
	exchange(t, far, client)
	exchange(t, client, far)
	if n := first.load(); n != 1 {
		t.Fatalf("the old session has %d streams, want 1", n)
	}
	second, _ := b.open()
	exchange(t, second, g.accept())
	if n := first.load(); n != 1 {
		t.Fatalf("a new stream went to the old session, which has %d", n)
	}
	// With its last stream the old session ends.
	reset(t, client)
	wantReset(t, "target", far)
	receive(t, first.ctx.Done(), "the end of the old session")
	eventually(t, "one link on the server", func() bool {
		return value(t, b.serverReg, "kasway_server_links_up", "") == 1
	})
}

// endControl makes the server end its Control: the agent half-closes it.
func endControl(t *testing.T, l *Links) {
	t.Helper()
	s, _ := l.links[0].current("")
	if err := s.control.CloseSend(); err != nil {
		t.Fatal(err)
	}
}

// A server that sends GOAWAY keeps its streams and gets no new ones.
func TestLinks_GoAway(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	client, _ := b.open()
	far := g.accept()
	exchange(t, client, far)
	stopped := make(chan struct{})
	go func() { defer close(stopped); b.server.grpc.GracefulStop() }()
	waitLinks(t, b.links, "not up", func(s Snapshot) bool { return s.Links[0].State != StateUp })
	exchange(t, client, far)
	reset(t, client)
	wantReset(t, "target", far)
	receive(t, stopped, "the end of the graceful stop")
}

// TCP_USER_TIMEOUT is set on both sides' sockets, also where the agent's dialer
// hides its socket from grpc-go.
func TestLinks_UserTimeout(t *testing.T) {
	hidden := make(chan net.Conn, 1)
	lis := listen(t)
	accepted := make(chan net.Conn, 1)
	ca := newAuthority(t)
	s := NewServer(ServerConfig{TLS: ca.serverTLS(), Dial: newTarget(t).dial})
	go func() { _ = s.Serve(&tapListener{lis, accepted}) }()
	t.Cleanup(s.Stop)
	l, _ := startLinks(t, LinksConfig{
		Servers: []string{lis.Addr().String()}, TLS: ca.agentTLS(),
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			c, err := new(net.Dialer).DialContext(ctx, network, addr)
			hidden <- c
			return wrapped{c}, err
		},
	})
	waitUp(t, l)
	for side, c := range map[string]net.Conn{"agent": <-hidden, "server": <-accepted} {
		raw, ok := rawConn(c)
		if !ok {
			t.Fatal("no socket")
		}
		var got int
		err := raw.Control(func(fd uintptr) {
			got, _ = unix.GetsockoptInt(int(fd), unix.IPPROTO_TCP, unix.TCP_USER_TIMEOUT)
		})
		if want := int(keepaliveTimeout / time.Millisecond); err != nil || got != want {
			t.Errorf("%s: TCP_USER_TIMEOUT is %d ms, want %d (%v)", side, got, want, err)
		}
	}
}

type wrapped struct{ net.Conn }

func (w wrapped) NetConn() net.Conn { return w.Conn }

type tapListener struct {
	net.Listener
	accepted chan net.Conn
}

func (l *tapListener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	l.accepted <- c
	return wrapped{c}, nil
}

// A path that swallows everything is noticed within keepaliveTime+Timeout, and
// its streams are reset within a second of that.
func TestLinks_DeadPath(t *testing.T) {
	if testing.Short() {
		t.Skip("waits for a keepalive")
	}
	t.Parallel()
	var hole blackhole
	g := newTarget(t)
	b := newBench(t, g.dial, setup{links: func(c *LinksConfig) { c.DialContext = hole.dial }})
	client, piped := b.open()
	far := g.accept()
	exchange(t, client, far)
	start := time.Now()
	hole.swallow()
	wantReset(t, "client", client)
	wantReset(t, "target", far)
	if d := time.Since(start); d > keepaliveTime+keepaliveTimeout+2*time.Second {
		t.Errorf("the dead path was noticed after %v", d)
	}
	receive(t, piped, "the pipe's end")
}

// blackhole relays links until told to swallow what it gets; the TCP
// connections stay up, so that only pings can tell.
type blackhole struct {
	mu   sync.Mutex
	gone bool
}

func (h *blackhole) swallow() { h.mu.Lock(); defer h.mu.Unlock(); h.gone = true }

func (h *blackhole) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.gone {
		return nil, errors.New("the path is dead")
	}
	far, err := new(net.Dialer).DialContext(ctx, network, addr)
	if err != nil {
		return nil, err
	}
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return nil, err
	}
	defer lis.Close()
	near, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		return nil, err
	}
	relay, err := lis.Accept()
	if err != nil {
		return nil, err
	}
	go h.relay(far, relay)
	go h.relay(relay, far)
	return near, nil
}

func (h *blackhole) relay(dst, src net.Conn) {
	defer dst.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := src.Read(buf)
		h.mu.Lock()
		gone := h.gone
		h.mu.Unlock()
		if err != nil {
			return
		}
		if !gone {
			_, _ = dst.Write(buf[:n])
		}
	}
}

// Whatever is behind the address, the reason says what is wrong with it.
func TestLinks_WrongPeer(t *testing.T) {
	t.Parallel() // some of them take a timeout's length
	ca := newAuthority(t)
	serverTLS := func(protos ...string) *tls.Config {
		c := ca.serverTLS()
		c.NextProtos = protos
		return c
	}
	grpcServer := func(services ...*grpc.ServiceDesc) func(*testing.T) string {
		return func(t *testing.T) string {
			s := NewServer(ServerConfig{TLS: ca.serverTLS()})
			g := grpc.NewServer(append(serverOptions(1), grpc.Creds(newServerCredentials(s)))...)
			for _, d := range services {
				g.RegisterService(d, nil)
			}
			lis := listen(t)
			go func() { _ = g.Serve(lis) }()
			t.Cleanup(g.Stop)
			return lis.Addr().String()
		}
	}
	answering := func(m *tunnelpb.ToAgent) *grpc.ServiceDesc {
		d := controlStream
		d.Handler = func(_ any, s grpc.ServerStream) error {
			if err := s.SendMsg(m); err != nil {
				return err
			}
			<-s.Context().Done()
			return nil
		}
		return &grpc.ServiceDesc{ServiceName: tunnelpb.Service, Streams: []grpc.StreamDesc{d}}
	}
	hello := func(lo, hi uint32) *tunnelpb.ToAgent {
		return &tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Hello{Hello: &tunnelpb.Hello{Version: "v9.9", MinProtocol: lo, Protocol: hi}}}
	}
	for name, test := range map[string]struct {
		listen func(*testing.T) string
		step   string
		want   []string
	}{
		"nobody":        {func(t *testing.T) string { l := listen(t); defer l.Close(); return l.Addr().String() }, stepConnect, []string{"refused"}},
		"no_tls":        {rawServer(nil, "SSH-2.0-OpenSSH_9.6\r\n"), stepTLS, []string{errNotKasway.Error(), "TLS"}},
		"http1":         {rawServer(serverTLS("http/1.1"), ""), stepTLS, nil},
		"no_alpn":       {rawServer(serverTLS(), ""), stepTLS, []string{errNotKasway.Error()}},
		"h2_garbage":    {rawServer(serverTLS("h2"), "HTTP/1.1 400 Bad Request\r\n\r\n"), stepHello, nil},
		"other_grpc":    {grpcServer(), stepHello, []string{errNotKasway.Error(), tunnelpb.Service}},
		"other_ca":      {rawServer(newAuthority(t).serverTLS(), ""), stepTLS, []string{"unknown authority"}},
		"too_new":       {grpcServer(answering(hello(7, 9))), stepVersion, []string{"v9.9 speaks 7 to 9", "v0.test speaks 1 to 1"}},
		"no_range":      {grpcServer(answering(hello(0, 9))), stepVersion, []string{"v9.9", "0 to 9"}},
		"no_hello":      {grpcServer(answering(&tunnelpb.ToAgent{})), stepHello, []string{"no hello"}},
		"says_nothing":  {rawServer(serverTLS("h2"), ""), stepHello, []string{"within"}},
		"silent_at_tcp": {silent, stepTLS, []string{"deadline"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := NewLinks(LinksConfig{Servers: []string{test.listen(t)}, TLS: ca.agentTLS(), Version: "v0.test"})
			_, err := l.links[0].establish(t.Context())
			var failed *linkError
			if !errors.As(err, &failed) || failed.step != test.step {
				t.Fatalf("failed with %v, want step %s", err, test.step)
			}
			for _, want := range test.want {
				if !contains(err.Error(), want) {
					t.Errorf("%v does not say %q", err, want)
				}
			}
		})
	}
}

// rawServer greets every connection and then reads.
func rawServer(cfg *tls.Config, greeting string) func(*testing.T) string {
	return func(t *testing.T) string {
		lis := listen(t)
		if cfg != nil {
			lis = tls.NewListener(lis, cfg)
		}
		t.Cleanup(func() { lis.Close() })
		go func() {
			for {
				c, err := lis.Accept()
				if err != nil {
					return
				}
				go func() {
					defer c.Close()
					_, _ = c.Write([]byte(greeting))
					_, _ = io.Copy(io.Discard, c)
				}()
			}
		}()
		return lis.Addr().String()
	}
}

// silent is a listener that nobody accepts from.
func silent(t *testing.T) string {
	lis := listen(t)
	t.Cleanup(func() { lis.Close() })
	return lis.Addr().String()
}

// A server that comes back is found again; the failures are counted by step.
func TestLinks_ServerComesBack(t *testing.T) {
	b := newBench(t, newTarget(t).dial, setup{})
	b.server.Stop()
	waitLinks(t, b.links, "waiting", func(s Snapshot) bool { return s.Links[0].State == StateWaiting })
	eventually(t, "failed attempts", func() bool {
		return value(t, b.agentReg, "kasway_agent_link_failures_total", stepConnect) > 2
	})
	if s := b.links.Snapshot().Links[0]; s.LastError == "" {
		t.Error("no last error")
	}
	lis, err := net.Listen("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	again := NewServer(ServerConfig{TLS: b.ca.serverTLS(), Dial: newTarget(t).dial})
	go func() { _ = again.Serve(lis) }()
	t.Cleanup(again.Stop)
	start := time.Now()
	waitUp(t, b.links)
	if d := time.Since(start); d > 2*time.Second {
		t.Errorf("found again only after %v", d)
	}
	if n := value(t, b.agentReg, "kasway_agent_links_up", ""); n != 1 {
		t.Errorf("links_up is %v", n)
	}
}
