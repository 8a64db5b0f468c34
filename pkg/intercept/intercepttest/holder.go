package intercepttest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// request is one line to the holder, reply the one line that it answers with.
type request struct {
	Op    string
	State rules.State
	// Guard are the rules of "guard".
	Guard []access.ClientRule
}

type reply struct {
	Err string
	// NotSupported: Err is intercept.ErrNotSupported.
	NotSupported bool
	Remedy       string
	Notes        []string
	// State is the applied one, with the ports of the listeners.
	State rules.State
	// Damage is what Verify tells of.
	Damage []intercept.Damage
}

// holding is the state of a holder process: one mode and its listeners.
type holding struct {
	factory Factory
	mode    intercept.Mode
	answers *answerer
	ports   map[string]rules.Ports // of the targets that have listeners
}

// hold serves requests until its input ends, which is when the test does.
func hold(f Factory, in io.Reader, out io.Writer) int {
	log := logrus.New() // on stderr, which the suite shows when a test fails
	log.SetLevel(logrus.DebugLevel)
	mode, err := f.New(log)
	if err != nil {
		fmt.Fprintf(os.Stderr, "making mode %s: %v\n", f.Name, err)
		return 1
	}
	h := &holding{factory: f, mode: mode, answers: newAnswerer(), ports: map[string]rules.Ports{}}
	requests, replies := json.NewDecoder(in), json.NewEncoder(out)
	for {
		var q request
		if err := requests.Decode(&q); err != nil {
			return 0
		}
		if err := replies.Encode(h.do(q)); err != nil {
			return 1
		}
	}
}

func (h *holding) do(q request) reply {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	var r reply
	var err error
	switch q.Op {
	case "preflight":
		report := h.mode.Preflight(ctx)
		err, r.Remedy, r.Notes = report.Err, report.Remedy, report.Notes
		r.NotSupported = errors.Is(err, intercept.ErrNotSupported)
	case "apply":
		r.State, err = h.apply(ctx, q.State)
	case "verify":
		r.Damage, err = h.mode.Verify(ctx)
	case "guard":
		guardWith(q.Guard)
	case "close":
		err = h.mode.Close()
	case "cleanup":
		err = h.factory.Cleanup(ctx)
	case "end":
		h.answers.close()
		if h.factory.Open == nil {
			err = removeNodeLocal(q.State.Node4, q.State.Node6)
		}
	default:
		err = errors.New("no such request: " + q.Op)
	}
	if err != nil {
		r.Err = err.Error()
	}
	return r
}

// apply opens listeners for targets that have none yet, and applies.
func (h *holding) apply(ctx context.Context, s rules.State) (rules.State, error) {
	for i := range s.Diverts {
		d := &s.Diverts[i]
		if ports, ok := h.ports[d.Name]; ok {
			d.Ports = ports
			continue
		}
		open, err := h.factory.open(&s, d)
		if err != nil {
			return s, fmt.Errorf("listeners of %s: %w", d.Name, err)
		}
		for _, l := range open {
			h.answers.serve(l.Listener, d.Name, l.Side)
		}
		h.ports[d.Name] = d.Ports
	}
	return s, h.mode.Apply(ctx, s)
}
