package tunnel

import (
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/grpc/mem"
	"google.golang.org/grpc/resolver"
	"google.golang.org/grpc/resolver/manual"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

const retryPolicy = `{"methodConfig":[{"name":[{}],"retryPolicy":{"maxAttempts":4,"initialBackoff":"0.001s",
	"maxBackoff":"0.001s","backoffMultiplier":1,"retryableStatusCodes":["UNAVAILABLE"]}}]}`

// A service config with a retry policy, as a DNS TXT record can bring one, makes
// gRPC send a stream's bytes again. With our options every byte arrives once.
func TestCase_B94_RetryPolicyIgnored(t *testing.T) {
	if streams, arrived, sent := sendWithRetryPolicy(t, linkOptions()...); streams != 1 || arrived != sent {
		t.Errorf("%d streams and %d bytes arrived, want 1 and %d", streams, arrived, sent)
	}
	// Without them it bites, so this test can see it.
	plain := grpc.WithDefaultCallOptions(grpc.ForceCodecV2(codec{}))
	if streams, arrived, sent := sendWithRetryPolicy(t, plain); streams < 2 || arrived <= sent {
		t.Errorf("gRPC alone: %d streams and %d of %d bytes arrived; this test shows nothing", streams, arrived, sent)
	}
}

// sendWithRetryPolicy sends one message to a server that takes it and fails the
// stream as UNAVAILABLE, twice at most.
func sendWithRetryPolicy(t *testing.T, opts ...grpc.DialOption) (streams, arrived, sent int) {
	t.Helper()
	forward := forwardStream
	forward.Handler = func(_ any, s grpc.ServerStream) error {
		streams++ // attempts follow each other
		var m mem.BufferSlice
		if err := s.RecvMsg(&m); err != nil {
			return err
		}
		arrived += m.Len()
		m.Free()
		if streams < 3 {
			return status.Error(codes.Unavailable, "try again")
		}
		return nil
	}
	g := grpc.NewServer(grpc.ForceServerCodecV2(codec{}))
	g.RegisterService(&grpc.ServiceDesc{ServiceName: tunnelpb.Service, Streams: []grpc.StreamDesc{forward}}, nil)
	lis := listen(t)
	go func() { _ = g.Serve(lis) }()
	defer g.Stop()

	r := manual.NewBuilderWithScheme("evil")
	cc, err := grpc.NewClient("evil:///server", append(opts,
		grpc.WithResolvers(r), grpc.WithTransportCredentials(insecure.NewCredentials()))...)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = cc.Close() }()
	r.BuildCallback = func(_ resolver.Target, conn resolver.ClientConn, _ resolver.BuildOptions) {
		_ = conn.UpdateState(resolver.State{
			Addresses:     []resolver.Address{{Addr: lis.Addr().String()}},
			ServiceConfig: conn.ParseServiceConfig(retryPolicy),
		})
	}
	s, err := cc.NewStream(t.Context(), &forwardStream, tunnelpb.MethodForward)
	if err != nil {
		t.Fatal(err)
	}
	payload := randomBytes(100)
	if err := s.SendMsg(mem.BufferSlice{mem.SliceBuffer(payload)}); err != nil {
		t.Fatal(err)
	}
	var m mem.BufferSlice
	for err == nil {
		err = s.RecvMsg(&m)
	}
	return streams, arrived, len(payload)
}
