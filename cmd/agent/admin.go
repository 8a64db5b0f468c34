package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"syscall"
	"time"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/observe"
)

// adminTimeout bounds one question to a running agent.
const adminTimeout = 5 * time.Second

// ask gets the status of the agent behind socket.
func ask(ctx context.Context, socket string) (s agent.Status, err error) {
	return s, askFor(ctx, socket, "/status", &s)
}

// askFor gets what the agent behind socket answers on path, into out.
func askFor(ctx context.Context, socket, path string, out any) error {
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent"+path, nil)
	if err != nil {
		return err
	}
	resp, err := observe.SocketClient(socket).Do(req)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("no agent answers on %s: is it running? (--admin-socket)", socket)
	}
	if err != nil {
		return fmt.Errorf("asking the agent: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("asking the agent: it answers %s", resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(out); err != nil {
		return fmt.Errorf("reading the agent's answer: %w", err)
	}
	return nil
}
