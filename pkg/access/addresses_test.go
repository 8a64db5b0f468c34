package access

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// names is a resolver that answers from a table that tests change.
type names struct {
	table map[string][]string
	asked int
	err   error
	hang  bool
}

func (n *names) LookupNetIP(ctx context.Context, _, host string) ([]netip.Addr, error) {
	n.asked++
	if n.hang {
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if n.err != nil {
		return nil, n.err
	}
	var out []netip.Addr
	for _, s := range n.table[host] {
		out = append(out, netip.MustParseAddr(s))
	}
	return out, nil
}

// Whoever controls a name must not make us connect to ourselves, to a cloud's
// metadata service or to a neighbour.
func TestNamesMayNotRebind(t *testing.T) {
	for _, bad := range []string{
		"127.0.0.1", "127.8.8.8", "::1", "169.254.169.254", "fe80::1", "fe80::1%lo", "0.0.0.0", "::",
		"224.0.0.1", "ff02::1", "::ffff:127.0.0.1", "::ffff:169.254.169.254", "::ffff:0.0.0.0",
	} {
		end := &dialled{}
		r := &names{table: map[string][]string{"evil.example": {bad}}}
		_, err := GuardAddresses(r, end.dial)(t.Context(), dial.Target{Name: "evil.example:6443"})
		var d *Denial
		if !errors.Is(err, dial.ErrDenied) || !errors.As(err, &d) || d.Reason != ReasonAddress || len(end.names) != 0 {
			t.Errorf("a name of %s: %v, dialled %v", bad, err, end.names)
		}
	}
}

func TestLiteralAddressesMayBeAnything(t *testing.T) {
	for name, want := range map[string]string{
		"localhost:6443":          "[127.0.0.1:6443]",
		"LocalHost:6443":          "[127.0.0.1:6443]",
		"127.0.0.1:6443":          "[127.0.0.1:6443]",
		"[::1]:6443":              "[[::1]:6443]",
		"169.254.169.254:80":      "[169.254.169.254:80]",
		"[::ffff:127.0.0.1]:6443": "[127.0.0.1:6443]",
		"[fe80::1%eth0]:6443":     "[[fe80::1%eth0]:6443]",
	} {
		end, r := &dialled{}, &names{}
		if _, err := GuardAddresses(r, end.dial)(t.Context(), dial.Target{Name: name}); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		if fmt.Sprint(end.names) != want || r.asked != 0 {
			t.Errorf("%s: dialled %v (want %s), asked the resolver %d times", name, end.names, want, r.asked)
		}
	}
}

// What was checked is what is dialled: a name that changes between the check
// and the dial has no second chance.
func TestCheckedAddressIsTheDialledOne(t *testing.T) {
	r := &names{table: map[string][]string{"kas.example": {"127.0.0.1", "10.0.0.1", "::ffff:10.0.0.2", "fd00::1"}}}
	end := &dialled{errs: map[string]error{
		"10.0.0.1:6443": dial.ErrRefused,
		"10.0.0.2:6443": dial.ErrUnreachable,
	}}
	c, err := GuardAddresses(r, end.dial)(t.Context(), dial.Target{ID: "x", Name: "kas.example:6443"})
	if err != nil || c != &end.conn {
		t.Fatal(c, err)
	}
	if got, want := fmt.Sprint(end.names), "[10.0.0.1:6443 10.0.0.2:6443 [fd00::1]:6443]"; got != want {
		t.Errorf("dialled %s, want %s", got, want)
	}
}

func TestResolvingFails(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &names{err: &net.DNSError{Err: "no such host", Name: "kas.example", IsNotFound: true}}
	end := &dialled{}
	g := &addresses{resolver: r, next: end.dial, known: map[string]answer{}, now: func() time.Time { return now }}
	target := dial.Target{Name: "kas.example:6443"}
	if _, err := g.dial(t.Context(), target); !errors.Is(err, dial.ErrUnreachable) {
		t.Errorf("an unknown name: %v", err)
	}
	r.err = nil
	if _, err := g.dial(t.Context(), target); !errors.Is(err, dial.ErrUnreachable) {
		t.Errorf("a name without addresses: %v", err)
	}
	r.table = map[string][]string{"kas.example": {"10.0.0.1"}}
	if _, err := g.dial(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	asked := r.asked
	if _, err := g.dial(t.Context(), target); err != nil || r.asked != asked {
		t.Errorf("%v; a fresh answer was asked for again (%d)", err, r.asked-asked)
	}
	// The last good answer stays in use, and is not waited for each time.
	now = now.Add(resolveFresh)
	r.err = errors.New("server failure")
	for range 3 {
		if _, err := g.dial(t.Context(), target); err != nil || r.asked != asked+1 {
			t.Errorf("%v; asked %d times while resolving fails", err, r.asked-asked)
		}
	}
	// A new answer is used when there is one.
	now = now.Add(resolveFresh)
	r.err, r.table = nil, map[string][]string{"kas.example": {"10.0.0.9"}}
	if _, err := g.dial(t.Context(), target); err != nil || end.names[len(end.names)-1] != "10.0.0.9:6443" {
		t.Errorf("%v, dialled %v", err, end.names)
	}
	// An answer gone bad is refused although the one before was good.
	now = now.Add(resolveFresh)
	r.table = map[string][]string{"kas.example": {"169.254.169.254"}}
	if _, err := g.dial(t.Context(), target); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("rebound name: %v", err)
	}
}

func TestResolvingIsPatientOnlyWithoutAnAnswer(t *testing.T) {
	now := time.Unix(1000, 0)
	r := &names{table: map[string][]string{"kas.example": {"10.0.0.1"}}}
	end := &dialled{}
	g := &addresses{resolver: r, next: end.dial, known: map[string]answer{}, now: func() time.Time { return now }}
	target := dial.Target{Name: "kas.example:6443"}
	if _, err := g.dial(t.Context(), target); err != nil {
		t.Fatal(err)
	}
	now, r.hang = now.Add(resolveFresh), true
	start := time.Now()
	if _, err := g.dial(t.Context(), target); err != nil || time.Since(start) > resolvePatience+2*time.Second {
		t.Errorf("%v after %v", err, time.Since(start))
	}
	// Whoever gives up is not kept.
	now = now.Add(resolveFresh)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := g.dial(ctx, target); !errors.Is(err, context.Canceled) {
		t.Errorf("after the client gave up: %v", err)
	}
}

// One silent address leaves time for the others, also within the default dial
// timeout of an upstream.
func TestAddressesShareTheTime(t *testing.T) {
	r := &names{table: map[string][]string{"kas.example": {"10.0.0.1", "10.0.0.2"}}}
	next := func(ctx context.Context, t dial.Target) (dial.Conn, error) {
		if t.Name == "10.0.0.1:6443" {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		return &conn{}, ctx.Err()
	}
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Second)
	defer cancel()
	if _, err := GuardAddresses(r, next)(ctx, dial.Target{Name: "kas.example:6443"}); err != nil {
		t.Errorf("the second address had no time: %v", err)
	}
	if ctx.Err() != nil {
		t.Error("the first address took all the time")
	}
}
