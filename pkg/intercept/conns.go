package intercept

import (
	"cmp"
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/dial"
)

// ConnState says how far a taken connection has come.
type ConnState string

// The states of a Carried connection, in this order.
const (
	// ConnHeld: it waits for a way to its target.
	ConnHeld ConnState = "held"
	// ConnDialling: the way is being opened.
	ConnDialling ConnState = "dialling"
	// ConnOpen: bytes pass.
	ConnOpen ConnState = "open"
)

// Conns are the connections that a Forwarder has taken and not yet ended. There
// are never more than the Server's MaxConnections. It is safe for concurrent use.
type Conns struct {
	mu   sync.Mutex
	live map[*Carried]struct{}
}

// NewConns makes an empty set.
func NewConns() *Conns { return &Conns{live: map[*Carried]struct{}{}} }

// Carried is one connection of Conns. It stays valid after its end. All its
// methods may be called from any goroutine.
type Carried struct {
	// Target says what it is for, as the server is told, and Client who made it.
	Target dial.Target
	Client Client
	// Since is when it was taken.
	Since time.Time

	client *dial.TCP
	state  atomic.Value // ConnState
	abort  context.CancelCauseFunc
}

// begin adds a connection, which abort ends; end takes it out again.
func (c *Conns) begin(client *dial.TCP, t dial.Target, who Client, since time.Time, abort context.CancelCauseFunc) *Carried {
	l := &Carried{Target: t, Client: who, Since: since, client: client, abort: abort}
	l.state.Store(ConnHeld)
	c.mu.Lock()
	defer c.mu.Unlock()
	c.live[l] = struct{}{}
	return l
}

func (c *Conns) end(l *Carried) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.live, l)
}

// Len is how many there are.
func (c *Conns) Len() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.live)
}

// Snapshot returns all of them, the oldest first.
func (c *Conns) Snapshot() []*Carried {
	c.mu.Lock()
	all := make([]*Carried, 0, len(c.live))
	for l := range c.live {
		all = append(all, l)
	}
	c.mu.Unlock()
	slices.SortFunc(all, func(a, b *Carried) int {
		return cmp.Or(a.Since.Compare(b.Since), cmp.Compare(a.Target.ID, b.Target.ID))
	})
	return all
}

// State is how far it has come.
func (l *Carried) State() ConnState { return l.state.Load().(ConnState) }

// Abort ends the connection at once: both of its ends see a reset. The cause is
// for the log. After the end it does nothing.
func (l *Carried) Abort(cause error) { l.abort(cause) }

// Traffic is what has passed through the client's socket so far.
type Traffic struct {
	// Sent are the bytes that came from the client, Received those sent to it.
	Sent, Received uint64
	// Quiet is for how long no byte has come or gone (TCP's keepalives are
	// none), to the millisecond; of a silent connection, its age.
	Quiet time.Duration
}

// Traffic asks the kernel, which counts anyway: the ways on which bytes are
// carried, splice among them, pay nothing for it. It costs a microsecond. ok is
// false once the connection has ended.
func (l *Carried) Traffic() (t Traffic, ok bool) {
	raw, err := l.client.SyscallConn()
	if err != nil {
		return t, false
	}
	var info *unix.TCPInfo
	cerr := raw.Control(func(fd uintptr) {
		info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
	})
	if cerr != nil || err != nil {
		return t, false
	}
	t.Sent, t.Received = info.Bytes_received, info.Bytes_sent-min(info.Bytes_retrans, info.Bytes_sent)
	if peerEnded(info.State) && t.Sent > 0 {
		t.Sent-- // the kernel counts the client's FIN as a byte
	}
	t.Quiet = time.Duration(min(info.Last_data_recv, info.Last_data_sent)) * time.Millisecond
	return t, true
}

func peerEnded(state uint8) bool {
	return state == tcpTimeWait || state == tcpCloseWait || state == tcpLastAck || state == tcpClosing
}
