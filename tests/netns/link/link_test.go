package link

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/kasway/kasway/tests/netns"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var (
	addrA = netip.MustParsePrefix("10.99.0.1/24")
	addrB = netip.MustParsePrefix("10.99.0.2/24")
	six   = netip.MustParsePrefix("fd00:99::2/64")
)

// hosts are two hosts that only the link joins on 10.99.0.0/24.
func hosts(t *testing.T, cfg Config) (*Link, *netns.Host, *netns.Host) {
	t.Helper()
	netns.Require(t)
	topo := netns.New(t, netns.Spec{})
	cfg.A = End{Host: topo.Node, Addr4: addrA, Addr6: netip.MustParsePrefix("fd00:99::1/64")}
	cfg.B = End{Host: topo.ControlPlane, Addr4: addrB, Addr6: six}
	l, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l, topo.Node, topo.ControlPlane
}

// serve runs f for each connection to addr of h.
func serve(t *testing.T, h *netns.Host, addr netip.Addr, f func(net.Conn)) string {
	t.Helper()
	l, err := h.Listen("tcp", netip.AddrPortFrom(addr, 0).String())
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			f(c)
			c.Close()
		}
	}()
	t.Cleanup(func() { l.Close(); <-done })
	return l.Addr().String()
}

func dial(t *testing.T, h *netns.Host, addr string) net.Conn {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 10*time.Second)
	defer cancel()
	c, err := h.Dial(ctx, "tcp", addr)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Close() })
	return c
}

const (
	testRate  = 200e6
	testDelay = 20 * time.Millisecond
)

// Direct TCP reaches the rate that is set, and no more.
func TestRate(t *testing.T) {
	_, a, b := hosts(t, Config{Delay: testDelay, Rate: testRate})
	addr := serve(t, b, addrB.Addr(), func(c net.Conn) { _, _ = io.Copy(c, io.LimitReader(zeros{}, 1<<30)) })
	c := dial(t, a, addr)
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	buf := make([]byte, 1<<20)
	if _, err := io.CopyN(io.Discard, c, 10<<20); err != nil { // slow start
		t.Fatal(err)
	}
	begun, n := time.Now(), 0
	for n < 50<<20 {
		m, err := c.Read(buf)
		if err != nil {
			t.Fatal(err)
		}
		n += m
	}
	rate := float64(n*8) / time.Since(begun).Seconds()
	t.Logf("%.0f Mbit/s of %.0f", rate/1e6, testRate/1e6)
	if rate < 0.8*testRate || rate > 1.1*testRate {
		t.Errorf("%.0f Mbit/s, want about %.0f", rate/1e6, testRate/1e6)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// A round trip takes twice the delay, over both families.
func TestRoundTrip(t *testing.T) {
	_, a, b := hosts(t, Config{Delay: testDelay, Rate: testRate})
	for _, ip := range []netip.Addr{addrB.Addr(), six.Addr()} {
		c := dial(t, a, serve(t, b, ip, func(c net.Conn) { _, _ = io.Copy(c, c) }))
		_ = c.SetDeadline(time.Now().Add(10 * time.Second))
		var trips []time.Duration
		for range 31 {
			begun := time.Now()
			if _, err := c.Write([]byte{1}); err != nil {
				t.Fatal(err)
			}
			if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
				t.Fatal(err)
			}
			trips = append(trips, time.Since(begun))
		}
		slices.Sort(trips)
		t.Logf("%s: from %s, median %s", ip, trips[0], trips[len(trips)/2])
		// A busy machine adds to many round trips, and takes off none.
		if trips[0] < 2*testDelay || trips[0] > 2*testDelay+10*time.Millisecond {
			t.Errorf("%s: round trips %v, want about %s", ip, trips, 2*testDelay)
		}
		c.Close()
	}
}

// datagrams sends n of 1000 bytes from a to b and counts those that arrive.
func datagrams(t *testing.T, a, b *netns.Host, n int) int {
	t.Helper()
	var in net.PacketConn
	var out net.Conn
	err := errors.Join(b.Do(func() (err error) {
		in, err = net.ListenPacket("udp", netip.AddrPortFrom(addrB.Addr(), 0).String())
		return err
	}), a.Do(func() (err error) {
		out, err = net.Dial("udp", in.LocalAddr().String())
		return err
	}))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = in.Close() }()
	defer out.Close()
	if err := in.(*net.UDPConn).SetReadBuffer(8 << 20); err != nil {
		t.Fatal(err)
	}
	for range n {
		if _, err := out.Write(make([]byte, 1000)); err != nil {
			t.Fatal(err)
		}
	}
	arrived := 0
	for {
		// Longer than what the queue holds takes at the slowest rate used here.
		_ = in.SetReadDeadline(time.Now().Add(500 * time.Millisecond))
		if _, _, err := in.ReadFrom(make([]byte, 2000)); err != nil {
			if !errors.Is(err, os.ErrDeadlineExceeded) {
				t.Fatal(err)
			}
			return arrived
		}
		arrived++
	}
}

func TestLoss(t *testing.T) {
	const sent, loss = 150, 0.2
	l, a, b := hosts(t, Config{Loss: loss, Seed: 1})
	arrived := datagrams(t, a, b, sent)
	ab, _ := l.Counts()
	if want := int(sent * (1 - loss)); arrived < want-20 || arrived > want+20 {
		t.Errorf("%d of %d arrive, want about %d", arrived, sent, want)
	}
	if ab.Lost == 0 || ab.Dropped > 0 {
		t.Errorf("counts: %+v", ab)
	}
}

// The same seed loses the same packets.
func TestSeed(t *testing.T) {
	losses := func(seed uint64) (lost []bool) {
		d := newDirection(Config{Loss: 0.3, Seed: seed}, 1)
		for range 100 {
			before := d.snapshot().Lost
			d.take(make([]byte, headerSize+100), time.Now())
			lost = append(lost, d.snapshot().Lost > before)
		}
		return lost
	}
	if !slices.Equal(losses(7), losses(7)) || slices.Equal(losses(7), losses(8)) {
		t.Error("losses do not follow the seed")
	}
}

func TestQueueIsBounded(t *testing.T) {
	l, a, b := hosts(t, Config{Rate: 1e6, Queue: 20_000})
	arrived := datagrams(t, a, b, 100)
	ab, _ := l.Counts()
	if arrived < 15 || arrived > 40 || ab.Dropped == 0 {
		t.Errorf("%d of 100 arrive, counts %+v; the queue holds about 20", arrived, ab)
	}
}

// Loss does not break TCP, and a dead path is silent until it lives again.
func TestDownAndLossyTCP(t *testing.T) {
	l, a, b := hosts(t, Config{Delay: time.Millisecond, Loss: 0.02, Seed: 3})
	c := dial(t, a, serve(t, b, addrB.Addr(), func(c net.Conn) { _, _ = io.Copy(c, c) }))
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	go func() { _, _ = io.CopyN(c, zeros{}, 1<<20) }()
	if _, err := io.CopyN(io.Discard, c, 1<<20); err != nil {
		t.Fatal(err)
	}
	if ab, ba := l.Counts(); ab.Lost+ba.Lost == 0 {
		t.Error("nothing was lost on the way")
	}
	l.SetDown(true)
	if _, err := c.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("on a dead path: %v, want silence", err)
	}
	l.SetDown(false)
	_ = c.SetReadDeadline(time.Now().Add(20 * time.Second))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		t.Errorf("after the path came back: %v", err)
	}
}

// A link whose hosts go first ends quietly.
func TestHostsGoFirst(t *testing.T) {
	netns.Require(t)
	topo, err := netns.Build(netns.Spec{})
	if err != nil {
		t.Fatal(err)
	}
	l, err := New(Config{A: End{Host: topo.Node, Addr4: addrA}, B: End{Host: topo.ControlPlane, Addr4: addrB}})
	if err := errors.Join(err, topo.Close()); err != nil {
		t.Fatal(err)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}
