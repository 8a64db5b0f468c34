package tunnel

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"errors"
	"io"
	"math/big"
	"net"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	dto "github.com/prometheus/client_model/go"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"
	"google.golang.org/grpc"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

func TestMain(m *testing.M) {
	logrus.SetOutput(io.Discard)
	goleak.VerifyTestMain(m)
}

// patience bounds every wait of a test; it is never reached when all is well.
const patience = 20 * time.Second

// authority is a CA of one test.
type authority struct {
	t    testing.TB
	key  *ecdsa.PrivateKey
	cert *x509.Certificate
	pool *x509.CertPool
}

var serial atomic.Int64

func newAuthority(t testing.TB) *authority {
	t.Helper()
	a := &authority{t: t, pool: x509.NewCertPool()}
	a.key, a.cert = a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: "test CA"}, IsCA: true, BasicConstraintsValid: true,
		KeyUsage: x509.KeyUsageCertSign,
	}, time.Hour)
	a.pool.AddCert(a.cert)
	return a
}

func (a *authority) sign(template *x509.Certificate, life time.Duration) (*ecdsa.PrivateKey, *x509.Certificate) {
	a.t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		a.t.Fatal(err)
	}
	template.SerialNumber = big.NewInt(serial.Add(1))
	template.NotBefore, template.NotAfter = time.Now().Add(-2*time.Hour), time.Now().Add(life)
	parent, signer := a.cert, a.key
	if parent == nil {
		parent, signer = template, key
	}
	der, err := x509.CreateCertificate(rand.Reader, template, parent, key.Public(), signer)
	if err != nil {
		a.t.Fatal(err)
	}
	cert, err := x509.ParseCertificate(der)
	if err != nil {
		a.t.Fatal(err)
	}
	return key, cert
}

func (a *authority) leaf(name string, life time.Duration) tls.Certificate {
	key, cert := a.sign(&x509.Certificate{
		Subject: pkix.Name{CommonName: name}, IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}, life)
	return tls.Certificate{Certificate: [][]byte{cert.Raw}, PrivateKey: key, Leaf: cert}
}

func (a *authority) serverTLS() *tls.Config {
	return &tls.Config{
		Certificates: []tls.Certificate{a.leaf("server", time.Hour)},
		ClientAuth:   tls.RequireAndVerifyClientCert, ClientCAs: a.pool,
	}
}

func (a *authority) agentTLS() *tls.Config {
	return &tls.Config{Certificates: []tls.Certificate{a.leaf("agent", time.Hour)}, RootCAs: a.pool}
}

// bench is a server and an agent with a link between them.
type bench struct {
	t      testing.TB
	ca     *authority
	addr   string
	server *Server
	links  *Links
	// serverReg and agentReg hold the metrics, log what both logged.
	serverReg, agentReg *prometheus.Registry
	log                 *logtest.Hook
	stopLinks           func()
}

// setup changes a bench's configuration before it starts.
type setup struct {
	server func(*ServerConfig)
	links  func(*LinksConfig)
	noLink bool
}

func newBench(t testing.TB, target dial.Func, set setup) *bench {
	t.Helper()
	b := &bench{t: t, ca: newAuthority(t), serverReg: prometheus.NewRegistry(), agentReg: prometheus.NewRegistry()}
	log, hook := logtest.NewNullLogger()
	log.SetLevel(logrus.DebugLevel)
	b.log = hook
	cfg := ServerConfig{
		TLS: b.ca.serverTLS(), Dial: target, ServerID: "server-1", Version: "v0.test",
		Log: log, Metrics: NewServerMetrics(b.serverReg),
	}
	if set.server != nil {
		set.server(&cfg)
	}
	b.server = NewServer(cfg)
	lis := listen(t)
	b.addr = lis.Addr().String()
	served := make(chan error, 1)
	go func() { served <- b.server.Serve(lis) }()
	t.Cleanup(func() {
		b.server.Stop()
		if err := <-served; err != nil {
			t.Errorf("Serve: %v", err)
		}
	})
	links := LinksConfig{
		Servers: []string{b.addr}, TLS: b.ca.agentTLS(), Node: "node-1", Version: "v0.test",
		Log: log, Metrics: NewLinksMetrics(b.agentReg),
	}
	if set.links != nil {
		set.links(&links)
	}
	b.links, b.stopLinks = startLinks(t, links)
	if !set.noLink {
		waitUp(t, b.links)
	}
	return b
}

// startLinks runs links until the test ends or the function is called.
func startLinks(t testing.TB, cfg LinksConfig) (*Links, func()) {
	t.Helper()
	l := NewLinks(cfg)
	ctx, cancel := context.WithCancel(context.Background())
	ran := make(chan error, 1)
	go func() { ran <- l.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ran; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	t.Cleanup(stop)
	return l, stop
}

func listen(t testing.TB) net.Listener {
	t.Helper()
	lis, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	return lis
}

// waitUp waits until all links are up.
func waitUp(t testing.TB, l *Links) {
	t.Helper()
	waitLinks(t, l, "all up", func(s Snapshot) bool {
		for _, link := range s.Links {
			if link.State != StateUp {
				return false
			}
		}
		return true
	})
}

// waitLinks waits, without polling, for a state of the links.
func waitLinks(t testing.TB, l *Links, what string, want func(Snapshot) bool) Snapshot {
	t.Helper()
	timeout := time.After(patience)
	for {
		changed := l.Changed()
		s := l.Snapshot()
		if want(s) {
			return s
		}
		select {
		case <-changed:
		case <-timeout:
			t.Fatalf("links never were %s, but %+v", what, s.Links)
		}
	}
}

// eventually polls for what nothing announces.
func eventually(t testing.TB, what string, ok func() bool) {
	t.Helper()
	for end := time.Now().Add(patience); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(end) {
			t.Fatalf("never happened: %s", what)
		}
	}
}

// value reads one metric: a counter or a gauge, of the given label value if any.
func value(t testing.TB, reg *prometheus.Registry, name, label string) float64 {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		if f.GetName() != name {
			continue
		}
		for _, m := range f.GetMetric() {
			if label == "" || hasLabel(m, label) {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

func hasLabel(m *dto.Metric, v string) bool {
	for _, l := range m.GetLabel() {
		if l.GetValue() == v {
			return true
		}
	}
	return false
}

// tcpPair is a connected pair of TCP sockets, closed with the test at the latest.
func tcpPair(t testing.TB) (a, b *net.TCPConn) {
	t.Helper()
	lis := listen(t)
	defer lis.Close()
	a2, err := net.Dial("tcp", lis.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	b2, err := lis.Accept()
	if err != nil {
		t.Fatal(err)
	}
	a, b = a2.(*net.TCPConn), b2.(*net.TCPConn)
	t.Cleanup(func() { _, _ = a.Close(), b.Close() })
	return a, b
}

// target is what a server dials: each dial hands the far end to accept.
type target struct {
	t     testing.TB
	conns chan *net.TCPConn
	seen  chan dial.Target
}

func newTarget(t testing.TB) *target {
	return &target{t: t, conns: make(chan *net.TCPConn, 1024), seen: make(chan dial.Target, 1024)}
}

func (g *target) dial(_ context.Context, t dial.Target) (dial.Conn, error) {
	near, far := tcpPair(g.t)
	g.seen <- t
	g.conns <- far
	return dial.NewTCP(near), nil
}

func (g *target) accept() *net.TCPConn { return receive(g.t, g.conns, "a dialled target") }

func receive[T any](t testing.TB, c <-chan T, what string) T {
	t.Helper()
	select {
	case v := <-c:
		return v
	case <-time.After(patience):
		t.Fatalf("%s never came", what)
	}
	panic("unreachable")
}

var connID atomic.Int64

func kas() dial.Target {
	return dial.Target{ID: "c" + strconv.FormatInt(connID.Add(1), 10), Name: "kas"}
}

// open opens a tunnelled connection and pipes a client's TCP connection into
// it, as an agent does. It returns the client's end, and the pipe's result.
func (b *bench) open() (*net.TCPConn, <-chan dial.Result) {
	b.t.Helper()
	client, local := tcpPair(b.t)
	c, err := b.links.Dial(b.t.Context(), kas())
	if err != nil {
		b.t.Fatal(err)
	}
	done := make(chan dial.Result, 1)
	go func() { done <- dial.Pipe(dial.NewTCP(local), c) }()
	_ = client.SetDeadline(time.Now().Add(patience))
	return client, done
}

// connPair is both faces of one stream over a link, without anything behind.
func connPair(t testing.TB) (agent, server *Conn, stop func()) {
	t.Helper()
	ca := newAuthority(t)
	conns := make(chan *Conn, 1)
	log, _ := logtest.NewNullLogger()
	s := NewServer(ServerConfig{TLS: ca.serverTLS(), Log: log})
	control, forward := controlStream, forwardStream
	control.Handler = func(_ any, stream grpc.ServerStream) error { return s.control(stream) }
	forward.Handler = func(_ any, stream grpc.ServerStream) error {
		if err := stream.SendHeader(map[string][]string{tunnelpb.KeyAccepted: {tunnelpb.ValueAccepted}}); err != nil {
			return err
		}
		link := linkOf(stream.Context())
		c := newServerConn(stream, link.lost, link.raw.LocalAddr(), link.raw.RemoteAddr(), s.cfg.Metrics.streams.bytes)
		conns <- c
		<-c.ctx.Done()
		if err := c.result(); err != nil {
			return toStatus(err)
		}
		return nil
	}
	g := grpc.NewServer(append(serverOptions(10), grpc.Creds(newServerCredentials(s)))...)
	g.RegisterService(&grpc.ServiceDesc{ServiceName: tunnelpb.Service, Streams: []grpc.StreamDesc{control, forward}}, nil)
	lis := listen(t)
	go func() { _ = g.Serve(lis) }()
	links, stopLinks := startLinks(t, LinksConfig{Servers: []string{lis.Addr().String()}, TLS: ca.agentTLS(), Log: log})
	waitUp(t, links)
	c, err := links.Dial(context.Background(), kas())
	if err != nil {
		t.Fatal(err)
	}
	server = receive(t, conns, "the server's conn")
	return c.(*Conn), server, func() {
		// The server first: with both directions ended the agent waits for it.
		_ = server.Close()
		_ = c.Close()
		<-c.(*Conn).ctx.Done()
		stopLinks()
		g.Stop()
	}
}

// isReset reports whether a read or write failed because of a RST.
func isReset(err error) bool {
	return err != nil && !errors.Is(err, io.EOF) && errors.Is(err, syscall.ECONNRESET)
}

func contains(s, sub string) bool { return strings.Contains(s, sub) }

// dialTo makes a dial.Func of something that always works.
func dialTo(f func(dial.Target) dial.Conn) dial.Func {
	return func(_ context.Context, t dial.Target) (dial.Conn, error) { return f(t), nil }
}

// memConn is a dial.Conn with nothing behind: reads wait for its end, writes
// are counted.
type memConn struct {
	net.Conn // of a net.Pipe, for what is not below
	once     sync.Once
	over     chan struct{}
	written  atomic.Int64
}

func newMemConn() *memConn {
	c, _ := net.Pipe()
	return &memConn{Conn: c, over: make(chan struct{})}
}

func (m *memConn) Read([]byte) (int, error)    { <-m.over; return 0, net.ErrClosed }
func (m *memConn) Write(p []byte) (int, error) { m.written.Add(int64(len(p))); return len(p), nil }
func (m *memConn) CloseWrite() error           { return nil }
func (m *memConn) Abort(error)                 { m.once.Do(func() { close(m.over) }) }
func (m *memConn) Close() error                { m.Abort(nil); return nil }
