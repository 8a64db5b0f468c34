package intercepttest

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// direct is who answers at the real KAS, as opposed to a target's listener.
const direct = "KAS"

// Answer is what the accepting side says about a connection.
type Answer struct {
	// Nonce is the client's own, so that no answer can be for another.
	Nonce string
	// Who accepted: a target's name, or "KAS".
	Who string
	// Side is "host" or "pods" for a target's listener.
	Side string
	// ID is the accepting side's number of the connection.
	ID uint64
	// Peer and Local are the addresses that it saw.
	Peer, Local netip.AddrPort
}

var lastID atomic.Uint64

// answerer accepts and answers every line with an Answer.
type answerer struct {
	wg sync.WaitGroup
	mu sync.Mutex
	// open holds what close must end; nil once it has been called.
	open map[io.Closer]bool
}

func newAnswerer() *answerer { return &answerer{open: map[io.Closer]bool{}} }

// serve takes ownership of l and returns at once.
func (a *answerer) serve(l net.Listener, who, side string) {
	if !a.add(l) {
		return
	}
	a.wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				if errors.Is(err, net.ErrClosed) {
					return
				}
				continue // such as EMFILE; the storm sees the loss
			}
			if a.add(c) {
				a.wg.Go(func() { a.converse(c, who, side) })
			}
		}
	})
}

func (a *answerer) add(c io.Closer) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.open == nil {
		c.Close()
		return false
	}
	a.open[c] = true
	return true
}

func (a *answerer) converse(c net.Conn, who, side string) {
	defer func() {
		a.mu.Lock()
		delete(a.open, c)
		a.mu.Unlock()
		c.Close()
	}()
	Converse(c, who, side)
}

// Converse answers every line that comes over c, until its end. It does not
// close c, but resets it if the holder's guard refuses the client.
func Converse(c net.Conn, who, side string) {
	if !admitted(c, who, side) {
		if t, ok := c.(interface{ SetLinger(sec int) error }); ok {
			_ = t.SetLinger(0)
		}
		return
	}
	answer := Answer{Who: who, Side: side, ID: lastID.Add(1), Peer: addrPort(c.RemoteAddr()), Local: addrPort(c.LocalAddr())}
	lines := bufio.NewScanner(c)
	for lines.Scan() {
		answer.Nonce = lines.Text()
		if json.NewEncoder(c).Encode(answer) != nil {
			return
		}
	}
}

// close ends all listeners and connections, and waits for their goroutines.
func (a *answerer) close() {
	a.mu.Lock()
	open := a.open
	a.open = nil
	a.mu.Unlock()
	for c := range open {
		c.Close()
	}
	a.wg.Wait()
}

// addrPort is a TCP address; a v4-mapped one is the IPv4 address it holds.
func addrPort(a net.Addr) netip.AddrPort {
	ap := a.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port())
}

// Flow is a client's connection whose other end answers.
type Flow struct {
	net.Conn
	lines *bufio.Reader
}

// NewFlow takes ownership of c.
func NewFlow(c net.Conn) *Flow { return &Flow{Conn: c, lines: bufio.NewReader(c)} }

var nonces atomic.Uint64

// Ask sends a nonce and returns the answer to it.
func (f *Flow) Ask(within time.Duration) (Answer, error) {
	var a Answer
	nonce := fmt.Sprintf("nonce-%d", nonces.Add(1))
	if err := f.SetDeadline(time.Now().Add(within)); err != nil {
		return a, err
	}
	if _, err := fmt.Fprintln(f, nonce); err != nil {
		return a, err
	}
	line, err := f.lines.ReadString('\n')
	if err != nil {
		return a, err
	}
	if err := json.Unmarshal([]byte(line), &a); err != nil {
		return a, fmt.Errorf("answered %q: %w", strings.TrimSpace(line), err)
	}
	if a.Nonce != nonce {
		return a, fmt.Errorf("sent %s and got the answer to %s", nonce, a.Nonce)
	}
	return a, nil
}

// End closes the connection by a reset, which leaves no port in TIME_WAIT:
// storms would run out of them.
func (f *Flow) End() {
	if t, ok := f.Conn.(*net.TCPConn); ok {
		_ = t.SetLinger(0)
	}
	f.Close()
}
