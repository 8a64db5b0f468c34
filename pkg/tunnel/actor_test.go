package tunnel

import (
	"bytes"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"
)

// actor runs one random program on one end of a carried connection.
type actor struct {
	conn     *net.TCPConn
	program  []int // sizes to send; then it ends or resets
	resets   bool
	sent     []byte
	sendErr  error
	ended    atomic.Bool
	received bytes.Buffer
	readErr  error
}

func newActor(rnd *rand.Rand, conn *net.TCPConn) *actor {
	a := &actor{conn: conn, resets: rnd.IntN(4) == 0}
	for range rnd.IntN(6) {
		a.program = append(a.program, 1+rnd.IntN(1<<uint(rnd.IntN(19))))
	}
	_ = conn.SetDeadline(time.Now().Add(patience))
	return a
}

func (a *actor) String() string {
	return fmt.Sprintf("program %v, resets %v, ended %v, sent %d (%v), received %d (%v)",
		a.program, a.resets, a.ended.Load(), len(a.sent), a.sendErr, a.received.Len(), a.readErr)
}

func (a *actor) send() {
	for _, n := range a.program {
		p := randomBytes(n)
		k, err := a.conn.Write(p)
		a.sent = append(a.sent, p[:k]...)
		if err != nil {
			a.sendErr = err
			return
		}
	}
	if a.resets {
		_ = a.conn.SetLinger(0)
		_ = a.conn.Close()
		return
	}
	a.ended.Store(true)
	a.sendErr = a.conn.CloseWrite()
}

func (a *actor) receive() { _, a.readErr = io.Copy(&a.received, struct{ io.Reader }{a.conn}) }

// check compares what a saw with what z did.
func (a *actor) check(t *testing.T, who string, z *actor) {
	t.Helper()
	_ = a.conn.Close()
	anyReset := a.resets || z.resets
	if !bytes.HasPrefix(z.sent, a.received.Bytes()) {
		t.Errorf("%s received %d bytes that are no prefix of the %d sent", who, a.received.Len(), len(z.sent))
	}
	// The kernel reports a reset once: where sending met it, reading sees an end.
	if a.readErr == nil && a.sendErr == nil && (!z.ended.Load() || a.received.Len() != len(z.sent)) {
		t.Errorf("%s saw a clean end after %d of %d bytes\nitself: %s\nfar side: %s", who, a.received.Len(), len(z.sent), a, z)
	}
	if !anyReset && (a.readErr != nil || a.sendErr != nil) {
		t.Errorf("%s failed without a reset: read %v, send %v", who, a.readErr, a.sendErr)
	}
}
