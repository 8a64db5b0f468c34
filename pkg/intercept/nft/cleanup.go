package nft

import (
	"context"
	"errors"
	"fmt"

	"golang.org/x/sys/unix"
)

// Cleanup removes every nftables table of ours, of any generation, in the
// network namespace of the calling thread, and lifts the guard. It may be
// called any number of times. The table of a living agent cannot be removed by
// anybody else and is an error.
func Cleanup(ctx context.Context) error {
	sock, err := openSocket()
	if err != nil {
		return fmt.Errorf("nft: cleaning up: %w", err)
	}
	errs := []error{lingering.close()}
	tables, err := sock.tables()
	errs = append(errs, err)
	for _, t := range tables {
		if !t.ours() {
			continue
		}
		if err := ctx.Err(); err != nil {
			errs = append(errs, err)
			break
		}
		var b batch
		b.deleteTable(t.family, t.name)
		switch err := sock.commit(&b); {
		case errors.Is(err, unix.ENOENT): // gone by itself
		case errors.Is(err, unix.EPERM) && t.owned:
			errs = append(errs, fmt.Errorf("table %s is that of an agent that is running, and goes with it: stop the agent, then clean up again", t.name))
		default:
			errs = append(errs, err)
		}
	}
	if err := errors.Join(append(errs, sock.close())...); err != nil {
		return fmt.Errorf("nft: cleaning up: %w", err)
	}
	return nil
}
