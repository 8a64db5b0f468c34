package intercept

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
)

func TestServerOverload(t *testing.T) {
	release := make(chan struct{})
	var host atomic.Bool
	m, v := metrics(t)
	r := newRig(t, ServerConfig{
		MaxConnections: 8, Metrics: m,
		Admit: func(t *Taken) error { t.FromHost = host.Load(); return nil },
		Handle: func(ctx context.Context, t Taken) {
			<-release
			echo(ctx, t)
		},
	})
	var served []*net.TCPConn
	for range 7 {
		served = append(served, r.dial(t))
	}
	eventually(t, "seven are taken", func() bool { return v.of("connections") == 7 })
	wantRefused(t, r.addr()) // the eighth place is the host's
	host.Store(true)
	served = append(served, r.dial(t))
	eventually(t, "the eighth is taken", func() bool { return v.of("connections") == 8 })
	for range 3 {
		wantRefused(t, r.addr())
	}
	if got := v.of("refused_total limit"); got != 4 {
		t.Errorf("%v refused, want 4", got)
	}
	if n := len(r.hook.AllEntries()); n != 1 {
		t.Errorf("%d log lines about the overload, want 1", n)
	}
	close(release)
	for _, c := range served {
		wantEcho(t, c)
		shut(c)
	}
	eventually(t, "all have ended", func() bool { return v.of("connections") == 0 })
	wantEcho(t, r.dial(t))
}

func TestServerWithoutDescriptors(t *testing.T) {
	m, v := metrics(t)
	r := newRig(t, ServerConfig{Handle: echo, Metrics: m})
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	f := os.NewFile(uintptr(fd), "client")
	defer f.Close()
	restore := noMoreFiles(t)
	if err := unix.Connect(fd, &unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}, Port: int(r.ports.Host4)}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "accept fails", func() bool { return v.of("accept_errors_total") >= 1 })
	start := v.of("accept_errors_total")
	time.Sleep(500 * time.Millisecond) // what is measured, not what is waited for
	if n := v.of("accept_errors_total") - start; n > 15 {
		t.Errorf("%v accepts failed in half a second: it spins", n)
	}
	restore()
	c, err := net.FileConn(f)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	wantEcho(t, c)
	// That one may have been taken before, by a descriptor that another test
	// has closed late.
	wantEcho(t, r.dial(t))
	var said []string
	for _, e := range r.hook.AllEntries() {
		if e.Data[observe.FieldListener] == r.addr() {
			said = append(said, e.Message)
		}
	}
	if want := []string{"cannot accept connections", "accepting again"}; !slices.Equal(said, want) {
		t.Errorf("logged %q, want %q", said, want)
	}
}

// noMoreFiles lets every further descriptor fail with EMFILE until restore.
func noMoreFiles(t *testing.T) (restore func()) {
	t.Helper()
	var before unix.Rlimit
	if err := unix.Getrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
		t.Fatal(err)
	}
	lowest, err := unix.Open("/dev/null", unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if err != nil {
		t.Fatal(err)
	}
	_ = unix.Close(lowest)
	if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &unix.Rlimit{Cur: uint64(lowest), Max: before.Max}); err != nil {
		t.Fatal(err)
	}
	restore = func() {
		if err := unix.Setrlimit(unix.RLIMIT_NOFILE, &before); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(restore)
	return restore
}

func TestServerRefusesBeforeAnyByte(t *testing.T) {
	m, v := metrics(t)
	r := newRig(t, ServerConfig{
		Metrics: m,
		Admit:   func(*Taken) error { return ErrStranger },
		Handle:  func(context.Context, Taken) { t.Error("handled") },
	})
	wantRefused(t, r.addr())
	if v.of("refused_total stranger") != 1 || v.of("taken_total kas") != 1 {
		t.Error("not counted")
	}
}

func TestServerSaysWhatItTook(t *testing.T) {
	got := make(chan Taken, 1)
	r := newRig(t, ServerConfig{Handle: func(ctx context.Context, t Taken) { got <- t; echo(ctx, t) }})
	for _, at := range Placed(loopback(), r.ports) {
		c := dialTo(t, at)
		tk := <-got
		if tk.Target != "kas" || tk.Side != HostSide || tk.Local != at || tk.Peer != unmapped(c.LocalAddr()) {
			t.Errorf("%s: took %+v", at, tk)
		}
	}
}

func TestServerCountsItsBacklog(t *testing.T) {
	m, v := metrics(t)
	r := newRig(t, ServerConfig{Handle: echo, Metrics: m})
	wantEcho(t, r.dial(t))
	l, err := listen(t.Context(), place{"kas", netip.AddrPortFrom(loopback()[0], 0)}, false)
	if err != nil {
		t.Fatal(err)
	}
	c := dialTo(t, l.addr)
	// It is the time that a frozen process lets pass which is to be noticed.
	time.Sleep(backloggedFor + 50*time.Millisecond)
	r.server.serve(l)
	eventually(t, "the second is taken", func() bool { return v.of("taken_total kas") == 2 })
	wantEcho(t, c)
	shut(c)
	if got := v.of("backlogged_total"); got != 1 {
		t.Errorf("%v connections seen to have waited, want the one of two", got)
	}
	l.close()
}

func TestServerShutdown(t *testing.T) {
	began := make(chan struct{})
	r := newRig(t, ServerConfig{Handle: func(ctx context.Context, t Taken) {
		close(began)
		<-ctx.Done()
		dial.NewTCP(t.Conn).Abort(nil)
	}})
	c := r.dial(t)
	<-began
	r.listeners.Close()
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	if err := r.server.Shutdown(ctx); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("Shutdown with a connection left: %v", err)
	}
	wantReset(t, c)
	if err := r.server.Shutdown(t.Context()); err != nil {
		t.Errorf("Shutdown when all is over: %v", err)
	}
	if _, err := r.listeners.Set(t.Context(), nil); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Set after Close: %v", err)
	}
}
