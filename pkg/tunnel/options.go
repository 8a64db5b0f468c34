package tunnel

import (
	"math"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/experimental"
	"google.golang.org/grpc/keepalive"
)

// Every number of the tunnel is in this file, with what it rests on.
const (
	// Windows for round trips up to 10 ms: a stream's rate is at most its window
	// per round trip, so 1 MiB gives 100 MB/s at 10 ms. A reader that stalls
	// costs up to one stream window of memory. The connection window is what
	// queues ahead of small requests while bulk is running (p50 of a ping beside
	// ten bulk streams: 10 ms with 16 MiB, 5 ms with 4 MiB) and must not be below
	// rate times round trip. Static values also switch off grpc-go's bandwidth
	// estimator, which would grow every stream to 16 MiB.
	streamWindow = 1 << 20
	linkWindow   = 4 << 20

	// readSize is how much one read of a local socket takes, and so the largest
	// message sent: 128 KiB less gRPC's 5 bytes of header. From 64 to 128 KiB
	// saved 5 to 10 % of the CPU time per byte; more gained little.
	readSize = 128<<10 - 5
	// copyBelow is the size up to which what was read moves into a buffer of its
	// own size, so that a queue of small messages does not hold 128 KiB each.
	copyBelow = 4 << 10
	// maxMessage is the largest message accepted. It leaves room for peers with
	// larger reads and bounds what one message can make us allocate.
	maxMessage = 1 << 20

	// writeBuffer is what a link gathers before it writes. The TLS connection
	// underneath buffers a record when reading, so a read buffer would only be
	// one more copy.
	writeBuffer = 64 << 10
	readBuffer  = 0

	// notSentLowat bounds what a link's socket holds unsent, ahead of the
	// scheduler that takes turns between streams: p50 of a ping beside bulk fell
	// from 10 to 4.5 ms.
	notSentLowat = 128 << 10
	// localSendBuffer bounds what the kernel holds for a local reader that
	// stalls; the default lets it grow to 4 MiB per connection.
	localSendBuffer = 256 << 10

	// A silent path is noticed after keepaliveTime+keepaliveTimeout. grpc-go
	// allows no less than 10 s. The timeout is also TCP_USER_TIMEOUT, so that
	// unacknowledged bytes end a link as fast as an unanswered ping.
	keepaliveTime    = 10 * time.Second
	keepaliveTimeout = 3 * time.Second
	// The server's own pings start only when the agent's have stopped.
	serverKeepaliveTime = 11 * time.Second
	// minPing must stay well below keepaliveTime of every release, or a server
	// cuts its agents for pinging too often.
	minPing = 5 * time.Second

	// connectTimeout, handshakeTimeout and helloTimeout bound the three steps
	// from nothing to a link. Each is some round trips and a retransmission.
	connectTimeout   = 5 * time.Second
	handshakeTimeout = 5 * time.Second
	helloTimeout     = 5 * time.Second

	// Reconnecting waits a random time from nothing to a bound that doubles from
	// backoffBase. While nobody accepts our connections, trying is cheap for the
	// other side and the bound stays at backoffRefused, so that clients are
	// served within a second of the server's return. Where somebody accepted and
	// the link still did not come up, each try costs that side a handshake, so
	// the bound grows to backoffRejected.
	backoffBase     = 100 * time.Millisecond
	backoffRefused  = 400 * time.Millisecond
	backoffRejected = 10 * time.Second
	// backoffHeld is how long a link must have been up before the next failure
	// counts as the first.
	backoffHeld = 10 * time.Second

	// closeWait is how long Close waits for the far side to confirm the end.
	closeWait = 5 * time.Second
	// resultWait is how long a failed send waits for the final status that says
	// why; it comes after data that the reading side has yet to take.
	resultWait = time.Second

	// maxHeaders is the limit of all headers of a stream: an OPEN of 4 KiB is 5.5
	// KiB of base64, the rest is gRPC's own.
	maxHeaders = 16 << 10

	// DefaultStreams and DefaultStreamsPerLink are the limits of a server that
	// is given none. A node's clients hold some hundreds of connections, and all
	// of them dial at once after a cut.
	DefaultStreams        = 100_000
	DefaultStreamsPerLink = 10_000
	// spareStreams is by how much HTTP/2's own limit exceeds StreamsPerLink:
	// above that one an agent would wait in silence, and not be told LIMIT.
	spareStreams = 256
)

// linkOptions are the agent's options of every gRPC connection, without those
// that say where it leads.
func linkOptions() []grpc.DialOption {
	return []grpc.DialOption{
		// A retried stream would send its bytes again. Retries are off, and no
		// service config, which could turn anything on, is read.
		grpc.WithDisableRetry(),
		grpc.WithDisableServiceConfig(),
		grpc.WithDisableHealthCheck(),
		grpc.WithNoProxy(),
		grpc.WithIdleTimeout(0),
		experimental.WithBufferPool(buffers),
		grpc.WithReadBufferSize(readBuffer),
		grpc.WithWriteBufferSize(writeBuffer),
		grpc.WithStaticStreamWindowSize(streamWindow),
		grpc.WithStaticConnWindowSize(linkWindow),
		grpc.WithMaxHeaderListSize(maxHeaders),
		grpc.WithKeepaliveParams(keepalive.ClientParameters{
			Time:                keepaliveTime,
			Timeout:             keepaliveTimeout,
			PermitWithoutStream: true,
		}),
		grpc.WithDefaultCallOptions(
			grpc.ForceCodecV2(codec{}),
			grpc.MaxCallRecvMsgSize(maxMessage),
			// Nothing is kept for a replay, which also saves up to 256 KiB for
			// each stream that has not been answered yet.
			grpc.MaxRetryRPCBufferSize(0),
		),
	}
}

func serverOptions(streamsPerLink int) []grpc.ServerOption {
	return []grpc.ServerOption{
		grpc.ForceServerCodecV2(codec{}),
		experimental.BufferPool(buffers),
		grpc.ReadBufferSize(readBuffer),
		grpc.WriteBufferSize(writeBuffer),
		grpc.StaticStreamWindowSize(streamWindow),
		grpc.StaticConnWindowSize(linkWindow),
		grpc.MaxRecvMsgSize(maxMessage),
		grpc.MaxHeaderListSize(maxHeaders),
		grpc.MaxConcurrentStreams(uint32(min(streamsPerLink+spareStreams, math.MaxInt32))),
		grpc.ConnectionTimeout(handshakeTimeout),
		grpc.KeepaliveParams(keepalive.ServerParameters{Time: serverKeepaliveTime, Timeout: keepaliveTimeout}),
		grpc.KeepaliveEnforcementPolicy(keepalive.EnforcementPolicy{MinTime: minPing, PermitWithoutStream: true}),
		grpc.WaitForHandlers(true),
	}
}
