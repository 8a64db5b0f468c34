package intercepttest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// firstSame is the first of the source ports of RunSamePort, below those that
// the kernel chooses.
const firstSame = 20001

// RunSamePort kills the agent while clients are connected, whose connections are
// reset, and connects them by the same source ports once the next one has
// applied: what the kernel remembers of the former connections must not lead
// them to where nobody listens any more.
func RunSamePort(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	w := build(t, f.node(netns.IptablesNFT))
	h := start(t, w, f)
	if _, err := h.Apply(State(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	var flows []*Flow
	cells := w.taken(f, "kas")
	for i, c := range cells {
		flow, err := c.by(firstSame + i)
		if err != nil {
			t.Fatalf("%s: %v", c, err)
		}
		flows = append(flows, flow)
	}
	// A process that dies resets the connections of which it has not read all.
	if err := errors.Join(h.Signal(syscall.SIGSTOP), h.stopped()); err != nil {
		t.Fatal(err)
	}
	for i, c := range cells {
		if _, err := flows[i].Write([]byte("not read any more\n")); err != nil {
			t.Fatalf("%s: %v", c, err)
		}
	}
	if err := h.Kill(); err != nil {
		t.Fatal(err)
	}
	for i, c := range cells {
		if err := flows[i].wasReset(); err != nil {
			t.Errorf("%s: %v", c, err)
		}
	}
	h = start(t, w, f)
	if _, err := h.Apply(State(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
	for i, c := range cells {
		flow, err := c.by(firstSame + i)
		if err != nil {
			t.Errorf("%s, by the source port of a connection that was reset: %v", c, err)
			continue
		}
		flow.End()
	}
	if err := errors.Join(h.Close(), h.Cleanup(), h.End()); err != nil {
		t.Error(err)
	}
}

// by connects the cell's client from a port of its own, and asks who is there.
func (c cell) by(port int) (*Flow, error) {
	d := &net.Dialer{Timeout: maxConnect, LocalAddr: &net.TCPAddr{IP: c.own().AsSlice(), Port: port}, Control: reusing}
	conn, err := c.client.DialWith(context.Background(), d, "tcp", c.to.addr.String())
	if err != nil {
		return nil, err
	}
	flow := NewFlow(conn)
	a, err := flow.Ask(answerLimit)
	if err == nil && a.Who != c.to.target {
		err = fmt.Errorf("answered by %s, want %s", a.Who, c.to.target)
	}
	if err != nil {
		flow.End()
		return nil, err
	}
	return flow, nil
}

func reusing(_, _ string, raw syscall.RawConn) error {
	var err error
	control := raw.Control(func(fd uintptr) {
		err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)
	})
	return errors.Join(control, os.NewSyscallError("SO_REUSEADDR", err))
}

// stopped waits until no thread of the holder runs any more.
func (h *Holder) stopped() error {
	return netns.Poll(answerLimit, func() error {
		threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", h.cmd.Process.Pid))
		for _, thread := range threads {
			stat, rerr := os.ReadFile(thread)
			if _, state, _ := strings.Cut(string(stat), ") "); rerr == nil && !strings.HasPrefix(state, "T") {
				err = errors.Join(err, fmt.Errorf("%s is %.1s", thread, state))
			}
		}
		return err
	})
}

// wasReset waits for the reset.
func (f *Flow) wasReset() error {
	defer f.End()
	if err := f.SetDeadline(time.Now().Add(answerLimit)); err != nil {
		return err
	}
	if _, err := f.lines.ReadByte(); !errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("not reset: %v", err)
	}
	return nil
}
