package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// roleEnv tells a process of this program which part it is to play; empty: it
// conducts.
const roleEnv = "KASWAY_BENCH_ROLE"

// answer carries what one request led to; Err is empty if it worked.
type answer[T any] struct {
	Value T
	Err   string
}

// worker is a process that answers one JSON request at a time.
type worker struct {
	cmd *netns.Cmd
	in  io.WriteCloser
	enc *json.Encoder
	dec *json.Decoder
}

// start starts cmd, this program itself, in a role.
func start(cmd *netns.Cmd, role string, env ...string) (*worker, error) {
	cmd.Env = append(append(os.Environ(), roleEnv+"="+role), env...)
	cmd.Stderr = os.Stderr
	cmd.WaitDelay = time.Second
	in, err := cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, fmt.Errorf("starting the %s: %w", role, err)
	}
	return &worker{cmd: cmd, in: in, enc: json.NewEncoder(in), dec: json.NewDecoder(out)}, nil
}

func (w *worker) end() error { return errors.Join(w.in.Close(), w.cmd.Wait()) }

// ask sends a request and waits for its answer.
func ask[T any](w *worker, request any) (T, error) {
	var a answer[T]
	if err := w.enc.Encode(request); err != nil {
		return a.Value, fmt.Errorf("the process is gone: %w", err)
	}
	if err := w.dec.Decode(&a); err != nil {
		return a.Value, fmt.Errorf("the process is gone: %w", err)
	}
	if a.Err != "" {
		return a.Value, errors.New(a.Err)
	}
	return a.Value, nil
}

// answerAll answers requests until standard input ends.
func answerAll[Q, T any](do func(Q) (T, error)) error {
	dec, enc := json.NewDecoder(os.Stdin), json.NewEncoder(os.Stdout)
	for {
		var q Q
		switch err := dec.Decode(&q); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		v, err := do(q)
		a := answer[T]{Value: v}
		if err != nil {
			a.Err = err.Error()
		}
		if err := enc.Encode(a); err != nil {
			return err
		}
	}
}
