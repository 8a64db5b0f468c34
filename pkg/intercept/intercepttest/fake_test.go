package intercepttest

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

func TestFake(t *testing.T) {
	answers := newAnswerer()
	defer answers.close()
	s := State(rules.Refuse)
	for i := range s.Diverts {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		s.Diverts[i].Ports.Host4 = addrPort(l.Addr()).Port()
		answers.serve(l, s.Diverts[i].Name, "host")
	}
	var f Fake
	if err := f.Apply(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	for _, target := range targets {
		c, err := f.Dial(t.Context(), netip.AddrPortFrom(target.cluster[0], servicePort), false)
		if err != nil {
			t.Fatal(err)
		}
		flow := NewFlow(c)
		if a, err := flow.Ask(patience); err != nil || a.Who != target.name {
			t.Errorf("%s: reached %q, %v", target.name, a.Who, err)
		}
		flow.End()
	}
	if err := f.Apply(t.Context(), refuse(s)); err != nil {
		t.Fatal(err)
	}
	kas := netip.AddrPortFrom(netns.KAS4, endpointPort)
	if _, err := f.Dial(t.Context(), kas, false); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("refused: %v", err)
	}
	if len(f.Applied()) != 2 {
		t.Errorf("applied: %v", f.Applied())
	}
	no := errors.New("no")
	f.FailApply(no)
	if err := f.Apply(t.Context(), s); !errors.Is(err, no) || len(f.Applied()) != 2 {
		t.Errorf("a failing Apply: %v, %d states", err, len(f.Applied()))
	}
	f.SetReport(intercept.NotSupported("none", "no kernel"))
	if r := f.Preflight(t.Context()); !errors.Is(r.Err, intercept.ErrNotSupported) {
		t.Errorf("preflight: %v", r.Err)
	}
}

func TestFakeAwait(t *testing.T) {
	var f Fake
	go func() {
		_ = f.Apply(t.Context(), State(rules.Refuse))
		_ = f.Close()
	}()
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
	defer cancel()
	if err := f.Await(ctx, func(s rules.State, active bool) bool { return !active && len(s.Diverts) > 0 }); err != nil {
		t.Errorf("after Apply and Close: %v, closed %d times", err, f.Closed())
	}
}
