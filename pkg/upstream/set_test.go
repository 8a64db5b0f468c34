package upstream

import (
	"context"
	"errors"
	"net"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/kasway/kasway/pkg/dial"
)

func TestSet(t *testing.T) {
	log, _ := logtest.NewNullLogger()
	w := &world{answers: map[string]error{"a:1": syscall.ECONNREFUSED}}
	s, err := NewSet([]Config{
		{Name: "kas", Addresses: []string{"a:1"}, Dialer: w.dial, Log: log},
		{Name: "b:1", Addresses: []string{"b:1"}, Dialer: w.dial, Log: log},
	})
	if err != nil {
		t.Fatal(err)
	}
	changed := s.Changed()
	if c, err := s.Dial(t.Context(), dial.Target{Name: "b:1"}); err != nil || c.(*conn).to != "b:1" {
		t.Errorf("%v %v", c, err)
	}
	if _, err := s.Dial(t.Context(), dial.Target{Name: "kas"}); !errors.Is(err, dial.ErrNoUpstream) {
		t.Errorf("%v", err)
	}
	<-changed
	if up := s.Up(); len(up) != 2 || up["kas"] || !up["b:1"] {
		t.Errorf("Up = %v", up)
	}
	if _, err := s.Dial(t.Context(), dial.Target{Name: "x\n"}); !errors.Is(err, dial.ErrNoUpstream) || strings.Contains(err.Error(), "\n") {
		t.Errorf("a name that no pool has: %v", err)
	}
	if _, err := NewSet([]Config{{Name: "a", Addresses: []string{"a:1"}, Log: log}, {Name: "a", Addresses: []string{"a:1"}, Log: log}}); err == nil {
		t.Error("two upstreams of one name")
	}
	if _, err := NewSet([]Config{{Name: "a", Log: log}}); err == nil {
		t.Error("an upstream without addresses")
	}
}

func TestRealSocketsFailOverAndRecover(t *testing.T) {
	fds := countFDs(t)
	first, second := listen(t, "127.0.0.1:0"), listen(t, "127.0.0.1:0")
	a := first.Addr().String()
	_ = first.Close()
	log, _ := logtest.NewNullLogger()
	p, err := NewPool(Config{Name: "kas", Addresses: []string{a, second.Addr().String()}, Log: log, ProbeEvery: 10 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { p.Run(ctx); close(done) }()
	peer := func() string {
		c, err := p.Dial(ctx, dial.Target{})
		if err != nil {
			t.Fatal(err)
		}
		defer c.Close()
		return c.RemoteAddr().String()
	}
	if got := peer(); got != second.Addr().String() {
		t.Errorf("dialled %s", got)
	}
	first = listen(t, a)
	for deadline := time.Now().Add(10 * time.Second); peer() != a; {
		if time.Now().After(deadline) {
			t.Fatal("the first address is back and not used")
		}
	}
	cancel()
	<-done
	_, _ = first.Close(), second.Close()
	for deadline := time.Now().Add(5 * time.Second); countFDs(t) > fds; {
		if time.Now().After(deadline) {
			t.Fatalf("%d descriptors, %d before", countFDs(t), fds)
		}
	}
}

func listen(t *testing.T, address string) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

func countFDs(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}
