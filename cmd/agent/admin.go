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
func ask(ctx context.Context, socket string) (agent.Status, error) {
	var s agent.Status
	ctx, cancel := context.WithTimeout(ctx, adminTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, "http://agent/status", nil)
	if err != nil {
		return s, err
	}
	resp, err := observe.SocketClient(socket).Do(req)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return s, fmt.Errorf("no agent answers on %s: is it running? (--admin-socket)", socket)
	}
	if err != nil {
		return s, fmt.Errorf("asking the agent: %w", err)
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return s, fmt.Errorf("asking the agent: it answers %s", resp.Status)
	}
	if err := json.NewDecoder(resp.Body).Decode(&s); err != nil {
		return s, fmt.Errorf("reading the agent's answer: %w", err)
	}
	return s, nil
}
