package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"github.com/cilium/ebpf/link"
)

// Cleanup removes what any agent has ever attached and pinned, without a
// configuration, any number of times, and the bpffs if an agent has mounted it.
func Cleanup(ctx context.Context) error {
	if err := CleanupPins(ctx, DefaultPinDir); err != nil {
		return err
	}
	if err := RemoveBPFFS(); err != nil {
		return fmt.Errorf("ebpf: cleaning up: %w", err)
	}
	return nil
}

// CleanupPins removes what is pinned below dir, and dir.
func CleanupPins(ctx context.Context, dir string) error {
	err := locked(dir, false, func() error { return removePins(ctx, dir) })
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("ebpf: cleaning up: %w", err)
	}
	return nil
}

func removePins(ctx context.Context, dir string) error {
	var errs []error
	groups, err := os.ReadDir(dir)
	errs = append(errs, err)
	for _, g := range groups {
		if err := ctx.Err(); err != nil {
			return errors.Join(append(errs, err)...)
		}
		group := filepath.Join(dir, g.Name())
		if !g.IsDir() {
			errs = append(errs, os.Remove(group))
			continue
		}
		errs = append(errs, removeGroup(group))
	}
	return errors.Join(append(errs, os.Remove(dir))...)
}

// removeGroup detaches what is pinned in one directory, the last hook first.
func removeGroup(dir string) error {
	var errs []error
	for _, h := range slices.Backward(hooks) {
		errs = append(errs, removePin(filepath.Join(dir, h.name)))
	}
	rest, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return errors.Join(errs...)
	}
	errs = append(errs, err)
	for _, f := range rest {
		errs = append(errs, os.Remove(filepath.Join(dir, f.Name())))
	}
	return errors.Join(append(errs, os.Remove(dir))...)
}

// removePin detaches at once, whoever else has the link open.
func removePin(path string) error {
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		// Not before 5.9; the kernel detaches with the last reference then.
		_ = l.Detach()
		_ = l.Close()
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
