package intercept

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"syscall"
	"time"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/rules"
)

// SelfTestName is the target that proves that a mode works: one more Divert,
// with a listener of its own.
const SelfTestName = "kasway-selftest"

// selfTestPort is one that nobody listens on (tcpmux), at addresses that the
// node has: a connect that is not diverted is refused.
const selfTestPort = 1

// selfTestTimeout bounds one connection of the self-test.
const selfTestTimeout = 3 * time.Second

type nonce [16]byte

// SelfTest proves with a real connection that the kernel diverts to this very
// process. It is safe for concurrent use.
type SelfTest struct {
	mu      sync.Mutex
	pending map[nonce]bool
}

// NewSelfTest makes a SelfTest.
func NewSelfTest() *SelfTest { return &SelfTest{pending: map[nonce]bool{}} }

// SelfTestEntries are what the Divert named SelfTestName diverts, for the
// node's addresses that are valid. In mode listen they are the listener's own
// addresses instead.
func SelfTestEntries(node4, node6 netip.Addr) []rules.Entry {
	var out []rules.Entry
	for _, a := range []netip.Addr{node4, node6} {
		if a.IsValid() {
			out = append(out, rules.Entry{Prefix: netip.PrefixFrom(a, a.BitLen()), Port: selfTestPort})
		}
	}
	return out
}

// Wrap makes a Handler that answers connections to SelfTestName and leaves all
// others to next.
func (s *SelfTest) Wrap(next Handler) Handler {
	return func(ctx context.Context, t Taken) {
		if t.Target != SelfTestName {
			next(ctx, t)
			return
		}
		s.answer(t.Conn)
	}
}

// answer echoes a nonce of Prove's; anything else is reset.
func (s *SelfTest) answer(c *net.TCPConn) {
	conn := dial.NewTCP(c)
	var n nonce
	err := conn.SetDeadline(time.Now().Add(selfTestTimeout))
	if err == nil {
		_, err = io.ReadFull(conn, n[:])
	}
	if err == nil && !s.take(n) {
		err = errors.New("not a nonce of this process")
	}
	if err == nil {
		_, err = conn.Write(n[:])
	}
	if err != nil {
		conn.Abort(err)
		return
	}
	_ = conn.Close() // the nonce is queued; Prove finds out whether it arrives
}

func (s *SelfTest) take(n nonce) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	ok := s.pending[n]
	delete(s.pending, n)
	return ok
}

// Prove connects to every entry of st's self-test, as any process of this host
// would, from the calling thread's network namespace. It fails unless each
// connection arrives here.
func (s *SelfTest) Prove(ctx context.Context, st rules.State) error {
	proven := 0
	for _, d := range st.Diverts {
		if d.Name != SelfTestName {
			continue
		}
		for _, e := range d.Entries {
			to := netip.AddrPortFrom(e.Prefix.Addr(), e.Port)
			if err := s.prove(ctx, to); err != nil {
				return fmt.Errorf("self-test connection to %s: %w", to, err)
			}
			proven++
		}
	}
	if proven == 0 {
		return errors.New("the self-test has no address to connect to")
	}
	return nil
}

func (s *SelfTest) prove(ctx context.Context, to netip.AddrPort) error {
	ctx, cancel := context.WithTimeout(ctx, selfTestTimeout)
	defer cancel()
	var n nonce
	_, _ = rand.Read(n[:]) // never fails
	s.mu.Lock()
	s.pending[n] = true
	s.mu.Unlock()
	defer s.take(n)

	var d net.Dialer
	d.SetMultipathTCP(false)
	c, err := d.DialContext(ctx, "tcp", to.String())
	if errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("it was not diverted: %w", bare(err))
	}
	if err != nil {
		return bare(err)
	}
	defer c.Close()
	deadline, _ := ctx.Deadline()
	if err := c.SetDeadline(deadline); err != nil {
		return err
	}
	if _, err := c.Write(n[:]); err != nil {
		return fmt.Errorf("it reached another process: %w", bare(err))
	}
	var back nonce
	if _, err := io.ReadFull(c, back[:]); err != nil {
		return fmt.Errorf("it reached another process: %w", bare(err))
	}
	// Whoever echoes everything is not us: we would have taken the nonce.
	if stillPending := s.take(n); stillPending || back != n {
		return errors.New("it reached another process, which answered")
	}
	return nil
}

// bare is err without the addresses of the connection: what is the matter is
// told in the same words each time.
func bare(err error) error {
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Err
	}
	return err
}
