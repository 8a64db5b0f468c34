package tunnel

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

func slice(b []byte) mem.BufferSlice { return mem.BufferSlice{mem.SliceBuffer(b)} }

func message(n int) mem.BufferSlice { return slice(make([]byte, n)) }

// Every sentinel that can travel comes out as itself, and as no other.
func TestResult_RoundTrip(t *testing.T) {
	for _, r := range results {
		err := fmt.Errorf("dial 10.0.0.1:6443: %w", r.sentinel)
		st := toStatus(err)
		if got := status.Code(st); got != r.code {
			t.Errorf("%s: code %v, want %v", r.reason, got, r.code)
		}
		if got := reasonOf(status.Convert(st)); got != r.reason {
			t.Errorf("%v travels as %s", r.sentinel, got)
		}
		back := fromStatus(st)
		for _, other := range results {
			if errors.Is(back, other.sentinel) != (other.reason == r.reason) {
				t.Errorf("%s came out as %v", r.reason, back)
			}
		}
		if r.reason != tunnelpb.ReasonDenied && !strings.Contains(back.Error(), "10.0.0.1:6443") {
			t.Errorf("%s: the text is lost: %v", r.reason, back)
		}
	}
}

func TestResult_Unknown(t *testing.T) {
	for name, err := range map[string]error{
		"no_reason":       status.Error(codes.Internal, "something"),
		"no_status":       errors.New("something"),
		"foreign_reason":  withReason(codes.Unavailable, "NEW_REASON", "something"),
		"unclassified":    toStatus(errors.New("something")),
		"version_is_none": withReason(codes.FailedPrecondition, tunnelpb.ReasonVersion, "something"),
	} {
		got := fromStatus(err)
		if !errors.Is(got, dial.ErrLost) || !strings.Contains(got.Error(), "something") {
			t.Errorf("%s: %v", name, got)
		}
	}
	if got := fromStatus(withReason(codes.Unavailable, "NEW_REASON", "x")).Error(); !strings.Contains(got, "NEW_REASON") {
		t.Errorf("the unknown reason is not named: %s", got)
	}
	if got := status.Convert(toStatus(errors.New(strings.Repeat("é", 10_000)))).Message(); len(got) > maxText {
		t.Errorf("a text of %d bytes", len(got))
	}
}

func TestResult_Label(t *testing.T) {
	for want, err := range map[string]error{
		"ok": nil, "reset": errReset, "lost": errLinkLost, "refused": &abortError{dial.ErrRefused},
		"denied": &openError{"missing", ""},
	} {
		if got := label(err); got != want {
			t.Errorf("%v: %s, want %s", err, got, want)
		}
	}
	if got := label(&abortError{errors.New("EPIPE")}); got != "reset" {
		t.Errorf("an abort is %s", got)
	}
}

func TestBackoff(t *testing.T) {
	var b backoff
	for i := range 40 {
		bound := backoffRefused
		if i < 16 {
			bound = min(bound, backoffBase<<i)
		}
		if d := b.next(backoffRefused); d < 0 || d > bound {
			t.Fatalf("failure %d waits %v, at most %v is due", i, d, bound)
		}
	}
	// Full jitter: the waits spread over the whole range.
	low, high := time.Hour, time.Duration(0)
	for range 1000 {
		d := b.next(backoffRejected)
		low, high = min(low, d), max(high, d)
	}
	if low > backoffRejected/20 || high < backoffRejected*19/20 {
		t.Errorf("1000 waits lie between %v and %v", low, high)
	}
	b.held(backoffHeld - 1)
	if b.failures == 0 {
		t.Error("a link that did not hold starts over")
	}
	b.held(backoffHeld)
	if b.failures != 0 {
		t.Error("a link that held does not start over")
	}
}

func TestBufferPool(t *testing.T) {
	p := newBufferPool(1<<10, 4<<10)
	for length, want := range map[int]int{0: 1 << 10, 1: 1 << 10, 1 << 10: 1 << 10, 1<<10 + 1: 4 << 10, 4 << 10: 4 << 10} {
		if b := p.Get(length); len(*b) != length || cap(*b) != want {
			t.Errorf("Get(%d) has length %d and capacity %d", length, len(*b), cap(*b))
		}
	}
	if b := p.Get(5 << 10); len(*b) != 5<<10 {
		t.Error("above all classes")
	}
	// A buffer given back short comes out at full length.
	b := p.Get(4 << 10)
	*b = (*b)[:1]
	p.Put(b)
	if b := p.Get(3 << 10); len(*b) != 3<<10 {
		t.Error("a short buffer spoils its class")
	}
	odd := make([]byte, 10)
	p.Put(&odd) // of no class: dropped
	if b := p.Get(10); cap(*b) != 1<<10 {
		t.Error("a foreign buffer came in")
	}
}

func TestCodec_PassesBytesWithoutCopy(t *testing.T) {
	m := message(1000)
	out, err := codec{}.Marshal(m)
	if err != nil || &out[0].ReadOnlyData()[0] != &m[0].ReadOnlyData()[0] {
		t.Fatal("copied", err)
	}
	var in mem.BufferSlice
	if err := (codec{}).Unmarshal(out, &in); err != nil || &in[0].ReadOnlyData()[0] != &m[0].ReadOnlyData()[0] {
		t.Fatal("copied", err)
	}
	if _, err := (codec{}).Marshal("text"); err == nil {
		t.Error("a string was encoded")
	}
	if err := (codec{}).Unmarshal(m, new(string)); err == nil {
		t.Error("decoded into a string")
	}
}

func TestDeadline(t *testing.T) {
	var d deadline
	expired := func() bool {
		select {
		case <-d.wait():
			return true
		default:
			return false
		}
	}
	if expired() || d.armed() {
		t.Fatal("the zero deadline")
	}
	d.set(time.Now().Add(-time.Second))
	if !expired() || !d.armed() {
		t.Fatal("a deadline in the past has not expired")
	}
	d.set(time.Now().Add(time.Hour))
	if expired() {
		t.Fatal("moved to the future, still expired")
	}
	waiting := d.wait()
	d.set(time.Now().Add(time.Millisecond))
	receive(t, waiting, "the deadline, by a channel taken before")
	d.set(time.Time{})
	if expired() || d.armed() {
		t.Fatal("removed, still there")
	}
}

func TestClean(t *testing.T) {
	for in, want := range map[string]string{"node-1": "node-1", "a\nb\x1b[31m": "a?b?[31m", "\xff": "?", "é": "é"} {
		if got := clean(in); got != want {
			t.Errorf("%q became %q, want %q", in, got, want)
		}
	}
	if got := clean(strings.Repeat("é", 1000)); len(got) > tunnelpb.MaxName {
		t.Errorf("%d bytes", len(got))
	}
}
