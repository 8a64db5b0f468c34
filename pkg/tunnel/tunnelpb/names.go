package tunnelpb

// Names on the wire.
const (
	// Service is the gRPC service of the tunnel.
	Service = "kasway.tunnel.v1.Tunnel"
	// MethodControl carries ToServer and ToAgent; MethodForward raw bytes.
	MethodControl = "/" + Service + "/Control"
	MethodForward = "/" + Service + "/Forward"
	// ContentSubtype is what follows "application/grpc+" in the content type.
	ContentSubtype = "kasway"
	// KeyOpen is the request metadata key of Open on a Forward stream.
	KeyOpen = "kasway-open-bin"
	// KeyAccepted is the response metadata key that says that the target was
	// dialled; its value is ValueAccepted.
	KeyAccepted   = "kasway-accepted"
	ValueAccepted = "1"
	// Domain is the domain of the ErrorInfo in a final status.
	Domain = "kasway.dev"
	// ALPN is the only application protocol of a link.
	ALPN = "h2"
)

// Reasons of the ErrorInfo in a final status.
const (
	ReasonRefused     = "REFUSED"
	ReasonDenied      = "DENIED"
	ReasonUnreachable = "UNREACHABLE"
	ReasonTimeout     = "TIMEOUT"
	ReasonNoUpstream  = "NO_UPSTREAM"
	ReasonLimit       = "LIMIT"
	ReasonLost        = "LOST"
	// ReasonVersion ends Control, and only Control: no common protocol.
	ReasonVersion = "VERSION"
)

// The protocols that this release speaks.
const (
	Protocol    = 1
	MinProtocol = 1
)

// Limits of Open, in bytes.
const (
	MaxOpen     = 4096 // the encoded message
	MaxID       = 64
	MaxTarget   = 260 // a host name of 253 bytes, a colon and a port
	MaxAddress  = 64
	MaxWorkload = 1024
	MaxCommand  = 64 // the kernel's names have 15
	// MaxName is the limit of Hello's name and version.
	MaxName = 253
)
