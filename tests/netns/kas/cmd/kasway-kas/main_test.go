package main

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

func TestUsage(t *testing.T) {
	for _, args := range [][]string{{}, {"--listen", "nonsense"}, {"--listen", "127.0.0.1:0", "--address", "x"}, {"--no-such-flag"}} {
		if err := run(t.Context(), args); !errors.Is(err, errUsage) {
			t.Errorf("%q: %v, want a usage error", args, err)
		}
	}
}

func TestServesUntilTold(t *testing.T) {
	ca := filepath.Join(t.TempDir(), "ca.pem")
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		done <- run(ctx, []string{"--listen", "127.0.0.1:0", "--listen", "127.0.0.2:0", "--ca-out", ca})
	}()
	if err := netns.Poll(5*time.Second, func() error { _, err := os.Stat(ca); return err }); err != nil {
		t.Error(err)
	}
	stop()
	if err := <-done; err != nil {
		t.Error(err)
	}
}

func TestPortTaken(t *testing.T) {
	if err := run(t.Context(), []string{"--listen", "192.0.2.1:1"}); err == nil || errors.Is(err, errUsage) {
		t.Errorf("an address that is not here: %v", err)
	}
}
