package tunnel

import (
	"context"
	"crypto/tls"
	"errors"
	"io"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/time/rate"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// Whoever is no agent of ours gets no link; each is counted by a reason and
// logged with its address, and the server goes on.
func TestServer_Strangers(t *testing.T) {
	t.Parallel() // two of them take a timeout's length
	b := newBench(t, newTarget(t).dial, setup{})
	b.server.quiet.limit.SetLimit(rate.Inf)
	other := newAuthority(t)
	hello := func(change func(*tls.Config)) func(net.Conn) {
		return func(c net.Conn) {
			cfg := b.ca.agentTLS()
			cfg.ServerName, cfg.NextProtos = "127.0.0.1", []string{"h2"}
			change(cfg)
			conn := tls.Client(c, cfg)
			if conn.Handshake() == nil { // in TLS 1.3 a client is done before the server judges it
				_, _ = io.Copy(io.Discard, conn)
			}
		}
	}
	say := func(text string) func(net.Conn) {
		return func(c net.Conn) {
			_, _ = c.Write([]byte(text))
			_, _ = io.Copy(io.Discard, c)
		}
	}
	for name, test := range map[string]struct {
		visit  func(net.Conn)
		reason string
	}{
		"garbage":        {say("\x00\xff\x00garbage, and enough of it"), refusedNotTLS},
		"http":           {say("GET / HTTP/1.1\r\nHost: x\r\n\r\n"), refusedNotTLS},
		"leaves_at_once": {func(c net.Conn) {}, refusedClosed},
		"half_a_hello": {func(c net.Conn) {
			_, _ = c.Write([]byte("\x16\x03\x01\x02\x00\x01"))
			_ = c.(*net.TCPConn).CloseWrite()
			_, _ = io.Copy(io.Discard, c)
		}, refusedClosed},
		"stops_halfway":  {say("\x16\x03\x01\x02\x00\x01"), refusedTimeout},
		"no_certificate": {hello(func(c *tls.Config) { c.Certificates = nil }), refusedNoCert},
		"other_ca":       {hello(func(c *tls.Config) { c.Certificates = []tls.Certificate{other.leaf("agent", time.Hour)} }), refusedUnknownCA},
		"expired":        {hello(func(c *tls.Config) { c.Certificates = []tls.Certificate{b.ca.leaf("agent", -time.Minute)} }), refusedExpired},
		"tls12":          {hello(func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), refusedVersion},
		"http1_alpn":     {hello(func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }), refusedALPN},
		"no_alpn":        {hello(func(c *tls.Config) { c.NextProtos = nil }), refusedALPN},
		"distrusts_us":   {hello(func(c *tls.Config) { c.RootCAs = other.pool }), refusedByPeer},
		"not_http2": {func(c net.Conn) {
			cfg := b.ca.agentTLS()
			cfg.ServerName, cfg.NextProtos = "127.0.0.1", []string{"h2"}
			say("GET / HTTP/1.1\r\nHost: something-long-enough\r\n\r\n")(tls.Client(c, cfg))
		}, refusedNoHello},
		"silent_after_tls": {hello(func(*tls.Config) {}), refusedNoHello},
	} {
		t.Run(name, func(t *testing.T) {
			before := value(t, b.serverReg, "kasway_server_handshake_failures_total", test.reason)
			c, err := net.Dial("tcp", b.addr)
			if err != nil {
				t.Fatal(err)
			}
			_ = c.SetDeadline(time.Now().Add(patience))
			test.visit(c)
			_ = c.Close()
			eventually(t, "counted as "+test.reason, func() bool {
				return value(t, b.serverReg, "kasway_server_handshake_failures_total", test.reason) == before+1
			})
			eventually(t, "logged", func() bool {
				if name == "leaves_at_once" { // as a health check does
					return b.logged("ended without a word", c.LocalAddr().String())
				}
				return b.logged("did not become a link", c.LocalAddr().String(), test.reason)
			})
			b.log.Reset()
		})
	}
	if got := value(t, b.serverReg, "kasway_server_links_up", ""); got != 1 {
		t.Errorf("%v links are up, want the agent's", got)
	}
	c, err := b.links.Dial(t.Context(), kas())
	if err != nil {
		t.Fatal(err)
	}
	c.Abort(nil)
}

// logged reports whether some line has the text and all values.
func (b *bench) logged(text string, values ...string) bool {
	for _, e := range b.log.AllEntries() {
		line, err := e.String()
		if err != nil || !strings.Contains(line, text) {
			continue
		}
		found := true
		for _, v := range values {
			found = found && strings.Contains(line, v)
		}
		if found {
			return true
		}
	}
	return false
}

// A flood of strangers does not become a flood of lines.
func TestServer_StrangersAreLoggedSparingly(t *testing.T) {
	b := newBench(t, newTarget(t).dial, setup{links: func(c *LinksConfig) { c.Servers = nil }})
	for range 200 {
		c, err := net.Dial("tcp", b.addr)
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Write([]byte("garbage, and enough of it"))
		_ = c.Close()
	}
	eventually(t, "all counted", func() bool {
		return value(t, b.serverReg, "kasway_server_handshake_failures_total", refusedNotTLS) == 200
	})
	if n := len(b.log.AllEntries()); n == 0 || n > 30 {
		t.Errorf("%d lines for 200 strangers", n)
	}
}

// Whom Admit refuses gets no link, hears DENIED, and is let in once it may.
func TestServer_Admit(t *testing.T) {
	secret := errors.New("not on the list")
	var allow atomic.Bool
	peers := make(chan Peer, 100)
	type key struct{}
	got := make(chan any, 1)
	b := newBench(t, func(ctx context.Context, _ dial.Target) (dial.Conn, error) {
		got <- ctx.Value(key{})
		return nil, dial.ErrRefused
	}, setup{noLink: true, server: func(c *ServerConfig) {
		c.Admit = func(ctx context.Context, p Peer) (context.Context, error) {
			peers <- p
			if !allow.Load() {
				return nil, secret
			}
			return context.WithValue(ctx, key{}, "identity"), nil
		}
	}, links: func(c *LinksConfig) { c.Node = "node\n1" }})
	s := waitLinks(t, b.links, "refused", func(s Snapshot) bool { return s.Links[0].LastError != "" })
	if e := s.Links[0].LastError; !contains(e, stepDenied) || contains(e, secret.Error()) {
		t.Errorf("the agent hears %q", e)
	}
	p := receive(t, peers, "Admit")
	if p.Node != "node?1" || len(p.Certificates) != 2 || p.Certificates[0].Subject.CommonName != "agent" || p.Addr == nil {
		t.Errorf("Admit got %+v", p)
	}
	eventually(t, "counted", func() bool {
		return value(t, b.serverReg, "kasway_server_handshake_failures_total", refusedDenied) > 0
	})
	if !b.logged("did not become a link", secret.Error()) {
		t.Error("the server's log does not say why")
	}
	allow.Store(true)
	waitUp(t, b.links)
	c, err := b.links.Dial(t.Context(), kas())
	if err != nil {
		t.Fatal(err)
	}
	if v := receive(t, got, "Dial"); v != "identity" {
		t.Errorf("Dial's context has %v", v)
	}
	c.Abort(nil)
	// Admitted links are asked about again with each stream.
	allow.Store(false)
	c, err = b.links.Dial(t.Context(), kas())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("a stream of a link no longer admitted: %v", err)
	}
}

// An agent whose protocols the server does not know hears both versions.
func TestServer_AgentTooNew(t *testing.T) {
	b := newBench(t, newTarget(t).dial, setup{})
	cc := b.rawClient()
	control, err := cc.NewStream(t.Context(), &controlStream, tunnelpb.MethodControl)
	if err != nil {
		t.Fatal(err)
	}
	err = control.SendMsg(&tunnelpb.ToServer{Message: &tunnelpb.ToServer_Hello{Hello: &tunnelpb.Hello{Version: "v9.9", MinProtocol: 7, Protocol: 9}}})
	if err != nil {
		t.Fatal(err)
	}
	var m tunnelpb.ToAgent
	if err := control.RecvMsg(&m); err != nil || m.GetHello().GetVersion() != "v0.test" {
		t.Fatalf("first the server's hello is due, got %v, %v", &m, err)
	}
	s := status.Convert(control.RecvMsg(&m))
	if reasonOf(s) != tunnelpb.ReasonVersion || !contains(s.Message(), "v9.9 speaks 7 to 9") || !contains(s.Message(), "v0.test speaks 1 to 1") {
		t.Fatalf("status %v", s)
	}
}

// The order on a link is Control, hello, then streams; Control comes once, and
// Answer does not exist yet.
func TestServer_StateMachine(t *testing.T) {
	b := newBench(t, newTarget(t).dial, setup{})
	cc := b.rawClient()
	ctx := t.Context()
	code := func(method string, first any) codes.Code {
		s, err := cc.NewStream(ctx, &forwardStream, method)
		if err != nil {
			t.Fatal(err)
		}
		if first != nil {
			_ = s.SendMsg(first)
		}
		var m tunnelpb.ToAgent
		for err == nil {
			err = s.RecvMsg(&m)
		}
		return status.Code(err)
	}
	if c := code("/"+tunnelpb.Service+"/Answer", nil); c != codes.Unimplemented {
		t.Errorf("Answer: %v", c)
	}
	if c := code(tunnelpb.MethodForward, nil); c != codes.InvalidArgument {
		t.Errorf("Forward without OPEN: %v", c)
	}
	open, err := encodeOpen(full())
	if err != nil {
		t.Fatal(err)
	}
	var cancel context.CancelFunc
	ctx, cancel = context.WithTimeout(metadata.AppendToOutgoingContext(ctx, tunnelpb.KeyOpen, open), 5*time.Second) // it would be carried
	if c := code(tunnelpb.MethodForward, nil); c != codes.InvalidArgument {
		t.Errorf("Forward before the hello: %v", c)
	}
	cancel()
	ctx = t.Context()
	if c := code(tunnelpb.MethodControl, &tunnelpb.ToServer{}); c != codes.InvalidArgument {
		t.Errorf("Control without hello: %v", c)
	}
	if c := code(tunnelpb.MethodControl, nil); c != codes.FailedPrecondition {
		t.Errorf("second Control: %v", c)
	}
}

// rawClient is a gRPC connection to the server without an agent's manners.
func (b *bench) rawClient() *grpc.ClientConn {
	b.t.Helper()
	l := newLink(NewLinks(LinksConfig{TLS: b.ca.agentTLS()}), b.addr)
	raw, err := net.Dial("tcp", b.addr)
	if err != nil {
		b.t.Fatal(err)
	}
	conn, err := l.secure(b.t.Context(), raw)
	if err != nil {
		b.t.Fatal(err)
	}
	s, err := newSession(context.Background(), l, raw, conn)
	if err != nil {
		b.t.Fatal(err)
	}
	b.t.Cleanup(func() { s.cancel(nil); s.close() })
	return s.cc
}
