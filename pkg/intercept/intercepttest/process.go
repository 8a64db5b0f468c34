package intercepttest

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// Holder is a process in a node's namespace that holds one mode. Its methods
// are for one goroutine at a time.
type Holder struct {
	cmd      *netns.Cmd
	stdin    io.WriteCloser
	requests *json.Encoder
	replies  *json.Decoder
	log      *buffer
	last     rules.State
}

// buffer is a strings.Builder for several goroutines.
type buffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (b *buffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.Write(p)
}

func (b *buffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.b.String()
}

// Start starts a holder on node. It ends with the topology at the latest.
func Start(node *netns.Host, f Factory) (*Holder, error) {
	exe, err := os.Executable()
	if err != nil {
		return nil, err
	}
	h := &Holder{cmd: node.Command(exe).Cgroup(netns.AgentUnit).BPFFS(), log: &buffer{}, last: State(rules.Refuse)}
	h.cmd.Env = append(os.Environ(), holderEnv+"="+f.Name, cgroupEnv+"="+node.Cgroup())
	h.cmd.Stderr = h.log
	// A child of the holder must not keep Wait waiting for the end of stderr.
	h.cmd.WaitDelay = time.Second
	in, err := h.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := h.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := h.cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the holder of %s: %w", f.Name, err)
	}
	h.stdin, h.requests, h.replies = in, json.NewEncoder(in), json.NewDecoder(out)
	return h, nil
}

// Log is what the holder and its mode have logged so far.
func (h *Holder) Log() string { return h.log.String() }

func (h *Holder) call(op string, s rules.State) (reply, error) {
	return h.send(request{Op: op, State: s})
}

func (h *Holder) send(q request) (reply, error) {
	op := q.Op
	var r reply
	if err := h.requests.Encode(q); err != nil {
		return r, fmt.Errorf("%s: the holder is gone: %w", op, err)
	}
	if err := h.replies.Decode(&r); err != nil {
		return r, fmt.Errorf("%s: the holder is gone: %w; it logged:\n%s", op, err, h.Log())
	}
	if r.Err != "" {
		return r, fmt.Errorf("%s: %s", op, r.Err)
	}
	return r, nil
}

// Preflight is the mode's; of its error the text is kept, and whether it is
// intercept.ErrNotSupported.
func (h *Holder) Preflight() intercept.Report {
	r, err := h.call("preflight", rules.State{})
	if r.NotSupported {
		err = notSupported{err}
	}
	return intercept.Report{Err: err, Remedy: r.Remedy, Notes: r.Notes}
}

// notSupported is an error that is intercept.ErrNotSupported besides.
type notSupported struct{ error }

func (notSupported) Is(target error) bool { return target == intercept.ErrNotSupported }

// Apply opens listeners for new targets and applies s. It returns the state
// with the ports that were chosen.
func (h *Holder) Apply(s rules.State) (rules.State, error) {
	r, err := h.call("apply", s)
	if err == nil {
		h.last = r.State
	}
	return r.State, err
}

// Verify is the mode's.
func (h *Holder) Verify() ([]intercept.Damage, error) {
	r, err := h.call("verify", h.last)
	return r.Damage, err
}

// Repair does what an agent does every other second: it applies the state again
// if that is damaged, and tells what was.
func (h *Holder) Repair() ([]intercept.Damage, error) {
	damage, err := h.Verify()
	if err == nil && len(damage) > 0 {
		_, err = h.Apply(h.last)
	}
	return damage, err
}

// Guard puts the agent's guard before what the holder serves from now on.
func (h *Holder) Guard(rules ...access.ClientRule) error {
	_, err := h.send(request{Op: "guard", State: h.last, Guard: rules})
	return err
}

// Close closes the mode; the listeners stay open.
func (h *Holder) Close() error { return h.ask("close") }

// Cleanup calls the mode package's Cleanup.
func (h *Holder) Cleanup() error { return h.ask("cleanup") }

func (h *Holder) ask(op string) error {
	_, err := h.call(op, h.last)
	return err
}

// Signal sends s to the process: SIGKILL, SIGSTOP, SIGCONT.
func (h *Holder) Signal(s syscall.Signal) error { return h.cmd.Signal(s) }

// Kill kills the process as kill -9 does, and waits until it is gone.
func (h *Holder) Kill() error {
	err := h.Signal(syscall.SIGKILL)
	_ = h.cmd.Wait() // reports the signal
	return err
}

// End closes the listeners and connections, takes the suite's own addresses
// off the node, and ends the process. It does not close the mode.
func (h *Holder) End() error {
	return errors.Join(h.ask("end"), h.stdin.Close(), h.cmd.Wait())
}
