package tunnel

import (
	"context"
	"errors"
	"maps"
	"net/netip"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/sirupsen/logrus"
	"golang.org/x/time/rate"
	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

func full() dial.Target {
	return dial.Target{
		ID: "c1", Name: "kas", Client: netip.MustParseAddrPort("10.0.0.7:41000"),
		Original: netip.MustParseAddrPort("[fd00::1]:443"), UID: 1000, UIDKnown: true, Workload: "kubelet.service", PID: 4242, Command: "kubelet",
	}
}

// What the server logs of a connection names its client, and stays one line.
func TestOpen_TheLogSaysWho(t *testing.T) {
	target := full()
	target.Command = "é\n\x01"
	f := fields(target, "node-1")
	want := logrus.Fields{
		observe.FieldConn: "c1", observe.FieldTarget: "kas", observe.FieldClient: "10.0.0.7:41000", observe.FieldNode: "node-1",
		observe.FieldWorkload: "kubelet.service", observe.FieldCommand: `é\n\x01`, observe.FieldPID: uint32(4242), observe.FieldUID: uint32(1000),
	}
	if !maps.Equal(f, want) {
		t.Errorf("%v, want %v", f, want)
	}
	for _, name := range []string{observe.FieldWorkload, observe.FieldCommand, observe.FieldPID, observe.FieldUID} {
		if v, there := fields(dial.Target{ID: "c1", Name: "kas"}, "node-1")[name]; there {
			t.Errorf("nobody is said to be %s %v", name, v)
		}
	}
}

func openMD(values ...string) metadata.MD { return metadata.MD{tunnelpb.KeyOpen: values} }

func TestOpen_RoundTrip(t *testing.T) {
	for _, want := range []dial.Target{full(), {ID: "x", Name: "[fd00::1]:6443"}, {ID: "x", Name: "kas", UIDKnown: true}} {
		s, err := encodeOpen(want)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decodeOpen(openMD(s)); err != nil || got != want {
			t.Errorf("got %+v, %v; want %+v", got, err, want)
		}
	}
}

// Whatever the kernel lets a process or a cgroup be called, its connection
// works, and the name arrives as far as it fits.
func TestCase_B96_AnyBytesInNames(t *testing.T) {
	seen := make(chan dial.Target, 1)
	b := newBench(t, func(_ context.Context, t dial.Target) (dial.Conn, error) {
		seen <- t
		return nil, dial.ErrRefused
	}, setup{})
	for name, workload := range map[string]string{
		"newline_control_utf8": "é\n\x01",
		"path_of_300":          "/" + strings.Repeat("kubepods.slice/é", 20)[:299],
		"not_utf8":             "\xff\xfe\x00name",
		"huge":                 strings.Repeat("ü", 100_000),
		"percent_and_header":   "%0d%0agrpc-status: 0\r\n",
	} {
		t.Run(name, func(t *testing.T) {
			target := full()
			target.Workload, target.Command = workload, workload
			c, err := b.links.Dial(t.Context(), target)
			if err != nil {
				t.Fatal(err)
			}
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, dial.ErrRefused) {
				t.Fatalf("the connection was not dialled: %v", err)
			}
			arrived := receive(t, seen, "the dial")
			want := strings.ToValidUTF8(workload, "\uFFFD")
			for most, got := range map[int]string{tunnelpb.MaxWorkload: arrived.Workload, tunnelpb.MaxCommand: arrived.Command} {
				if !strings.HasPrefix(want, got) || !utf8.ValidString(got) || len(want) <= most && got != want {
					t.Errorf("arrived as %q", got)
				}
				if len(want) > most && len(got) < most-utf8.UTFMax {
					t.Errorf("cut to %d bytes", len(got))
				}
			}
		})
	}
}

// What names the target is never cut: the agent refuses it.
func TestOpen_NothingMeaningfulIsCut(t *testing.T) {
	for name, target := range map[string]dial.Target{
		"no_id":       {Name: "kas"},
		"no_target":   {ID: "c1"},
		"long_target": {ID: "c1", Name: strings.Repeat("x", tunnelpb.MaxTarget+1)},
		"long_id":     {ID: strings.Repeat("x", tunnelpb.MaxID+1), Name: "kas"},
	} {
		if _, err := encodeOpen(target); !errors.Is(err, dial.ErrDenied) {
			t.Errorf("%s: %v", name, err)
		}
	}
	largest := full()
	largest.ID, largest.Name = strings.Repeat("i", tunnelpb.MaxID), strings.Repeat("t", tunnelpb.MaxTarget)
	largest.Workload = strings.Repeat("w", 10*tunnelpb.MaxWorkload)
	largest.Command, largest.PID = largest.Workload, 1<<32-1
	if s, err := encodeOpen(largest); err != nil || len(s) > tunnelpb.MaxOpen {
		t.Errorf("%d bytes, %v", len(s), err)
	}
}

// bad are OPENs that break the protocol, with the kind they are counted as.
func bad(t testing.TB) map[string]struct {
	values []string
	kind   string
} {
	enc := func(o *tunnelpb.Open) string {
		b, err := proto.Marshal(o)
		if err != nil {
			t.Fatal(err)
		}
		return string(b)
	}
	good := enc(&tunnelpb.Open{Id: "c1", Target: "kas"})
	return map[string]struct {
		values []string
		kind   string
	}{
		"missing":      {nil, "missing"},
		"empty":        {[]string{""}, "invalid"},
		"repeated":     {[]string{good, good}, "repeated"},
		"garbage":      {[]string{"\xff\xfe\x00garbage"}, "malformed"},
		"truncated":    {[]string{good[:len(good)-1]}, "malformed"},
		"not_utf8":     {[]string{"\x0a\x01\xff\x12\x03kas"}, "malformed"},
		"huge":         {[]string{enc(&tunnelpb.Open{Id: "c1", Target: "kas", Workload: strings.Repeat("x", 4096)})}, "too_large"},
		"long_field":   {[]string{enc(&tunnelpb.Open{Id: "c1", Target: "kas", Workload: strings.Repeat("x", 1025)})}, "invalid"},
		"no_target":    {[]string{enc(&tunnelpb.Open{Id: "c1"})}, "invalid"},
		"no_id":        {[]string{enc(&tunnelpb.Open{Target: "kas"})}, "invalid"},
		"bad_client":   {[]string{enc(&tunnelpb.Open{Id: "c1", Target: "kas", Client: "10.0.0.1"})}, "invalid"},
		"bad_original": {[]string{enc(&tunnelpb.Open{Id: "c1", Target: "kas", Original: "kas.example:443"})}, "invalid"},
	}
}

// A bad OPEN is refused with a reason, counted and logged; nothing is dialled
// and the link goes on.
func TestOpen_Bad(t *testing.T) {
	b := newBench(t, func(context.Context, dial.Target) (dial.Conn, error) {
		t.Error("dialled")
		return nil, dial.ErrRefused
	}, setup{})
	b.server.quiet.limit.SetLimit(rate.Inf)
	s, _ := b.links.links[0].current("")
	counts := map[string]float64{}
	for name, test := range bad(t) {
		ctx := metadata.NewOutgoingContext(t.Context(), openMD(test.values...))
		stream, err := s.cc.NewStream(ctx, &forwardStream, tunnelpb.MethodForward)
		if err != nil {
			t.Fatal(err)
		}
		_ = stream.SendMsg(nil)
		err = stream.RecvMsg(new(tunnelpb.Open))
		if !errors.Is(fromStatus(err), dial.ErrDenied) {
			t.Errorf("%s: %v, want a denial", name, err)
		}
		counts[test.kind]++
		if got := value(t, b.serverReg, "kasway_server_bad_opens_total", test.kind); got != counts[test.kind] {
			t.Errorf("%s: counted %v times as %s", name, got, test.kind)
		}
		if !b.logged("a stream was refused", test.kind, "node-1") {
			t.Errorf("%s: not logged", name)
		}
	}
	eventually(t, "no stream left", func() bool {
		return value(t, b.serverReg, "kasway_server_streams_active", "") == 0
	})
}

// Headers beyond the limit cost the stream, not the link.
func TestOpen_HeadersOverTheLimit(t *testing.T) {
	b := newBench(t, newTarget(t).dial, setup{})
	s, _ := b.links.links[0].current("")
	ctx := metadata.NewOutgoingContext(t.Context(), openMD(strings.Repeat("x", maxHeaders)))
	stream, err := s.cc.NewStream(ctx, &forwardStream, tunnelpb.MethodForward)
	if err == nil {
		err = stream.RecvMsg(new(tunnelpb.Open))
	}
	if err == nil {
		t.Fatal("accepted")
	}
	if c, err := b.links.Dial(t.Context(), kas()); err != nil {
		t.Fatal(err)
	} else {
		c.Abort(nil)
	}
}

// A message above the limit ends its stream as lost, and only that one.
func TestServer_MessageOverTheLimit(t *testing.T) {
	g := newTarget(t)
	b := newBench(t, g.dial, setup{})
	client, _ := b.open()
	far := g.accept()
	s, _ := b.links.links[0].current("")
	open, err := encodeOpen(kas())
	if err != nil {
		t.Fatal(err)
	}
	ctx := metadata.AppendToOutgoingContext(t.Context(), tunnelpb.KeyOpen, open)
	stream, err := s.cc.NewStream(ctx, &forwardStream, tunnelpb.MethodForward)
	if err != nil {
		t.Fatal(err)
	}
	_ = stream.SendMsg(message(maxMessage + 1))
	wantReset(t, "target", g.accept())
	if err := stream.RecvMsg(new(tunnelpb.Open)); err == nil {
		t.Error("the stream lives")
	}
	exchange(t, client, far)
}

func FuzzDecodeOpen(f *testing.F) {
	s, err := encodeOpen(full())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(s)
	for _, test := range bad(f) {
		for _, v := range test.values {
			f.Add(v)
		}
	}
	f.Fuzz(func(t *testing.T, s string) {
		target, err := decodeOpen(openMD(s))
		if err != nil {
			var bad *openError
			if !errors.As(err, &bad) {
				t.Fatalf("untyped error %v", err)
			}
			return
		}
		// What is accepted can be sent on, and means the same then.
		again, err := encodeOpen(target)
		if err != nil {
			t.Fatal(err)
		}
		if got, err := decodeOpen(openMD(again)); err != nil || got != target {
			t.Fatalf("%+v became %+v, %v", target, got, err)
		}
	})
}

func FuzzDecodeControl(f *testing.F) {
	for _, m := range []proto.Message{
		&tunnelpb.ToServer{Message: &tunnelpb.ToServer_Hello{Hello: newHello("v1", "node-1")}},
		&tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Upstreams{Upstreams: &tunnelpb.Upstreams{Up: map[string]bool{"kas": true}}}},
		&tunnelpb.ToAgent{},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var s tunnelpb.ToServer
		if (codec{}).Unmarshal(slice(b), &s) == nil && s.GetHello() != nil {
			err := checkHello("server", newHello("v1", "s"), "agent", s.GetHello())
			if err == nil && (s.GetHello().GetMinProtocol() > tunnelpb.Protocol || s.GetHello().GetProtocol() < tunnelpb.MinProtocol) {
				t.Fatalf("accepted %v", s.GetHello())
			}
			if name := clean(s.GetHello().GetName()); len(name) > tunnelpb.MaxName || strings.ContainsAny(name, "\n\x00\x1b") {
				t.Fatalf("name %q", name)
			}
		}
		var a tunnelpb.ToAgent
		if (codec{}).Unmarshal(slice(b), &a) == nil {
			_ = a.GetUpstreams().GetUp()["kas"]
		}
	})
}
