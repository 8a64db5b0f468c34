package intercept

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/rules"
)

// listenEnv makes the test binary a process that listens there, says so and
// waits for its standard input to end.
const listenEnv = "KASWAY_TEST_LISTEN"

func TestMain(m *testing.M) {
	if at := os.Getenv(listenEnv); at != "" {
		l, err := net.Listen("tcp", at)
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		fmt.Println(l.Addr())
		_, _ = bufio.NewReader(os.Stdin).ReadByte()
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// logs collects what is logged.
func logs(t *testing.T) (logrus.FieldLogger, *logtest.Hook) {
	t.Helper()
	log, hook := logtest.NewNullLogger()
	log.SetLevel(logrus.DebugLevel)
	return log, hook
}

// values reads metrics by name and label values: "held", "refused_total own".
type values struct {
	t   *testing.T
	reg *prometheus.Registry
}

func metrics(t *testing.T) (*Metrics, values) {
	reg := prometheus.NewRegistry()
	return NewMetrics(reg), values{t, reg}
}

func (v values) of(key string) float64 {
	v.t.Helper()
	families, err := v.reg.Gather()
	if err != nil {
		v.t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "kasway_agent_intercept_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			if name == key {
				return m.GetCounter().GetValue() + m.GetGauge().GetValue()
			}
		}
	}
	return 0
}

// eventually polls for what the kernel gives no event of.
func eventually(t *testing.T, what string, ok func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(2 * time.Millisecond) {
		if ok() {
			return
		}
	}
	t.Fatalf("%s: not within 10 s", what)
}

// openFiles counts this process's descriptors.
func openFiles(t *testing.T) int {
	t.Helper()
	fds, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(fds)
}

// backToBase fails t unless at its end no more descriptors are open than now.
func backToBase(t *testing.T) {
	t.Helper()
	// The poller's own descriptors come with the first socket, and stay.
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l.Close()
	base := openFiles(t)
	t.Cleanup(func() {
		eventually(t, "descriptors closed", func() bool {
			runtime.GC() // package net pools the pipes that it splices with
			return openFiles(t) <= base
		})
	})
}

func loopback() []netip.Addr {
	return []netip.Addr{netip.MustParseAddr("127.0.0.1"), netip.IPv6Loopback()}
}

func target(name string) rules.Target { return rules.Target{Name: name} }

// rig is a Server with listeners for target "kas" on the loopback addresses.
type rig struct {
	server    *Server
	listeners *Listeners
	ports     rules.Ports
	metrics   values
	hook      *logtest.Hook
}

func newRig(t *testing.T, cfg ServerConfig) *rig {
	t.Helper()
	backToBase(t)
	r := &rig{}
	if cfg.Metrics == nil {
		cfg.Metrics, r.metrics = metrics(t)
	}
	if cfg.MaxConnections == 0 {
		cfg.MaxConnections = 100
	}
	cfg.Log, r.hook = logs(t)
	r.server = NewServer(cfg)
	r.listeners = NewListeners(ListenersConfig{Addresses: loopback(), Server: r.server})
	ports, err := r.listeners.Set(t.Context(), []rules.Target{target("kas")})
	if err != nil {
		t.Fatal(err)
	}
	r.ports = ports["kas"]
	t.Cleanup(func() {
		r.listeners.Close()
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		if err := r.server.Shutdown(ctx); err != nil {
			t.Errorf("Shutdown: %v", err)
		}
	})
	return r
}

func (r *rig) addr() netip.AddrPort { return netip.AddrPortFrom(loopback()[0], r.ports.Host4) }

func (r *rig) dial(t *testing.T) *net.TCPConn {
	t.Helper()
	return dialTo(t, r.addr())
}

func dialTo(t *testing.T, at netip.AddrPort) *net.TCPConn {
	t.Helper()
	c, err := net.Dial("tcp", at.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	if err := c.SetDeadline(time.Now().Add(10 * time.Second)); err != nil {
		t.Fatal(err)
	}
	return c.(*net.TCPConn)
}

// wantRefused fails t unless a connection to at is reset before any byte comes.
func wantRefused(t *testing.T, at netip.AddrPort) {
	t.Helper()
	c, err := net.Dial("tcp", at.String())
	if errors.Is(err, syscall.ECONNRESET) {
		return // before connect was seen to have succeeded
	}
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wantReset(t, c)
}

// wantReset fails t unless c was reset before any byte came.
func wantReset(t *testing.T, c net.Conn) {
	t.Helper()
	if err := c.SetReadDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if n, err := c.Read(make([]byte, 1)); n != 0 || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("read %d bytes and %v, want a reset and nothing before", n, err)
	}
}

// wantEcho fails t unless c answers with what it is sent.
func wantEcho(t *testing.T, c net.Conn) {
	t.Helper()
	const text = "through"
	got := make([]byte, len(text))
	_, err := io.WriteString(c, text)
	if err == nil {
		_, err = io.ReadFull(c, got)
	}
	if err != nil || string(got) != text {
		t.Errorf("echo %q, %v", got, err)
	}
}

// echo is a Handler.
func echo(_ context.Context, t Taken) {
	_, _ = io.Copy(t.Conn, t.Conn)
	shut(t.Conn)
}

// shut closes what a test has no more use for.
func shut(c io.Closer) { c.Close() }
