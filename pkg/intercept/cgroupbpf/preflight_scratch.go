package cgroupbpf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// scratchPrefix begins the names of cgroups that only a preflight uses.
const scratchPrefix = "kasway-probe-"

// scratchEnd bounds how long a killed process takes to leave its cgroup.
const scratchEnd = 2 * time.Second

// scratch is an empty cgroup below another one, for one probe. Its lock ends
// with this process however it dies: what is not locked is left over.
type scratch struct {
	path string
	dir  *os.File
}

// newScratch makes one. Somebody's sweep may take it for a leftover as long as
// it is not locked; then the next one is made.
func newScratch(root string) (s scratch, err error) {
	for range 3 {
		path, err := os.MkdirTemp(root, scratchPrefix)
		if err != nil {
			return s, fmt.Errorf("making a cgroup for a probe: %w", err)
		}
		if s.dir, err = lockDir(path); err == nil {
			return scratch{path, s.dir}, nil
		}
		if !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EWOULDBLOCK) {
			return s, errors.Join(err, unix.Rmdir(path))
		}
	}
	return s, fmt.Errorf("making a cgroup for a probe: each was removed at once by somebody else: %w", os.ErrNotExist)
}

// lockDir opens a directory and locks it, unless it is locked already.
func lockDir(path string) (*os.File, error) {
	dir, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("locking %s: %w", path, err), dir.Close())
	}
	// A sweep may have had the lock in between.
	if _, err := os.Stat(path); err != nil {
		return nil, errors.Join(err, dir.Close())
	}
	return dir, nil
}

// remove ends what runs in s and removes it.
func (s scratch) remove() error {
	return errors.Join(removeScratch(s.path), s.dir.Close())
}

// sweepScratch removes what probes of dead processes have left below root.
func sweepScratch(root string) error {
	entries, err := os.ReadDir(root)
	if err != nil {
		return fmt.Errorf("looking for leftovers of probes: %w", err)
	}
	var errs []error
	for _, e := range entries {
		if !e.IsDir() || !strings.HasPrefix(e.Name(), scratchPrefix) {
			continue
		}
		path := filepath.Join(root, e.Name())
		dir, err := lockDir(path)
		if err != nil {
			continue // in use, or swept by somebody else at this moment
		}
		errs = append(errs, removeScratch(path), dir.Close())
	}
	return errors.Join(errs...)
}

// removeScratch ends what runs in the cgroup, which is at most the child of a
// killed probe, and removes it.
func removeScratch(path string) error {
	events, err := os.Open(filepath.Join(path, "cgroup.events"))
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("removing the cgroup %s: %w", path, err)
	}
	defer events.Close()
	// Kernels before 5.14 have no such file; there the child ends by itself.
	_ = os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0)
	for end := time.Now().Add(scratchEnd); ; {
		// Reading first: the event is what changes afterwards.
		if _, err := events.ReadAt(make([]byte, 64), 0); err != nil && !errors.Is(err, io.EOF) && !errors.Is(err, unix.ENODEV) {
			return fmt.Errorf("removing the cgroup %s: %w", path, err)
		}
		err := unix.Rmdir(path)
		left := time.Until(end)
		switch {
		case err == nil, errors.Is(err, unix.ENOENT):
			return nil
		case !errors.Is(err, unix.EBUSY) || left <= 0:
			return fmt.Errorf("removing the cgroup %s: %w", path, err)
		}
		change := []unix.PollFd{{Fd: int32(events.Fd()), Events: unix.POLLPRI}}
		if _, err := unix.Poll(change, int(left.Milliseconds())+1); err != nil && !errors.Is(err, unix.EINTR) {
			return fmt.Errorf("waiting for the end of the cgroup %s: %w", path, err)
		}
	}
}
