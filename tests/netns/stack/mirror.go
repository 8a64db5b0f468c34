package stack

import (
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// Mirror serves a stand-in for anything on the addresses of h: it answers each
// line with the address that it sees the client come from, a space, and the
// line. It stops when the listeners are closed by stop.
func Mirror(h *netns.Host, at ...netip.AddrPort) (stop func(), err error) {
	var (
		wg        sync.WaitGroup
		listeners []net.Listener
	)
	stop = func() {
		for _, l := range listeners {
			_ = l.Close()
		}
		wg.Wait()
	}
	for _, a := range at {
		l, err := h.Listen("tcp", a.String())
		if err != nil {
			stop()
			return nil, err
		}
		listeners = append(listeners, l)
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { mirror(c) })
			}
		})
	}
	return stop, nil
}

func mirror(c net.Conn) {
	defer c.Close()
	for {
		// A peer that neither speaks nor ends is not waited for.
		if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			return
		}
		line, err := readLine(c)
		if err != nil {
			return
		}
		if _, err := fmt.Fprintf(c, "%s %s\n", c.RemoteAddr(), line); err != nil {
			return
		}
	}
}

// AskMirror sends a line and returns who the far side says is speaking.
func AskMirror(c net.Conn, line string, timeout time.Duration) (netip.AddrPort, error) {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return netip.AddrPort{}, err
	}
	answer, err := readLine(c)
	if err != nil {
		return netip.AddrPort{}, err
	}
	who, said, _ := strings.Cut(answer, " ")
	if said != line {
		return netip.AddrPort{}, fmt.Errorf("the far side answers %q, not %q", said, line)
	}
	return netip.ParseAddrPort(who)
}

// readLine reads byte by byte: nothing behind the line is taken.
func readLine(r io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		if line = append(line, b[0]); len(line) > 1024 {
			return "", errors.New("a line of more than 1024 bytes")
		}
	}
}
