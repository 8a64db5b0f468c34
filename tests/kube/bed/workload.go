package bed

import (
	"bytes"
	"context"
	"fmt"
)

// StartWorkload creates the pods of files/workload.yaml, and does not wait for
// them.
func (b *Bed) StartWorkload(ctx context.Context) error { return b.apply(ctx, "workload.yaml") }

// StartLoad creates those of files/load.yaml, which ask the KAS all the time.
func (b *Bed) StartLoad(ctx context.Context) error { return b.apply(ctx, "load.yaml") }

// apply gives one of files/ to kubectl apply.
func (b *Bed) apply(ctx context.Context, name string) error {
	text, err := render(name, b.values())
	if err != nil {
		return err
	}
	if out, err := b.Kubectl(ctx, bytes.NewReader(text), "apply", "-f", "-").CombinedOutput(); err != nil {
		return fmt.Errorf("kubectl apply -f %s: %w: %s", name, err, out)
	}
	return nil
}
