package cgroupbpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"

	"golang.org/x/sys/unix"
)

// BPFFSPoint is where the node's bpffs is, or is to be, mounted. What is pinned
// there outlives its process.
const BPFFSPoint = "/sys/fs/bpf"

// bpffsSource tells a bpffs that an agent has mounted from everybody else's.
const bpffsSource = "kasway"

const (
	remedyBPFFS = "mount it on the node (mount -t bpf bpf " + BPFFSPoint + "; systemd does so at boot), or let the agent: " +
		"with CAP_SYS_ADMIN it mounts it itself"
	remedyNoBPFFS = "mount it on the node (mount -t bpf bpf " + BPFFSPoint + "; systemd does so at boot), and give it to the agent's " +
		"container by hostPath " + BPFFSPoint + " with mountPropagation HostToContainer"
	remedyPrivateBPFFS = "give the agent's container the node's: hostPath " + BPFFSPoint + " with mountPropagation " +
		"Bidirectional (HostToContainer, if the node has it mounted already)"
)

// preloaded are what some kernels put into each bpffs by themselves.
var preloaded = []string{"maps.debug", "progs.debug"}

// BPFFS is the file system that pins go to.
type BPFFS struct {
	// Point is where it is mounted.
	Point string
	// Missing: nothing is mounted there yet, and Ensure may.
	Missing bool
	// Ours: an agent has mounted it.
	Ours bool
	// Note says what could not be told; may be empty.
	Note string
}

// FindBPFFS looks for the bpffs at or above dir, and mounts nothing; "" stands
// for BPFFSPoint. An error wraps intercept.ErrNotSupported where there is none
// and none may be mounted, or where it would end with this container.
func FindBPFFS(dir string) (BPFFS, error) { return here().findBPFFS(dir, mayMount()) }

func (s system) findBPFFS(dir string, mayMount bool) (BPFFS, error) {
	own, err := s.mounts(ownMounts)
	if err != nil {
		return BPFFS{}, err
	}
	if dir == "" {
		dir = BPFFSPoint
	}
	m, mounted := covering(own, dir)
	b := BPFFS{Point: m.Point, Ours: m.Source == bpffsSource}
	if !mounted || m.Type != "bpf" {
		b = BPFFS{Point: BPFFSPoint, Missing: true}
		if !within(BPFFSPoint, dir) {
			return b, unmetf(remedyBPFFS, "no bpffs is mounted at %s", dir)
		}
		if !mayMount {
			return b, unmetf(remedyBPFFS, "no bpffs is mounted at %s, so nothing can be pinned and the programs would end with the agent", b.Point)
		}
	}
	init, err := s.mounts(initMounts)
	if err != nil {
		b.Note = fmt.Sprintf("whether the bpffs outlives this container cannot be told: %v", err)
		return b, nil
	}
	return outlives(b, m, seatOf(own, init), init)
}

// outlives finds out whether what is pinned to b, the mount m, stays when this
// process's mount namespace ends.
func outlives(b BPFFS, m Mount, sits seat, init []Mount) (BPFFS, error) {
	switch {
	case sits == withInit:
	case b.Missing:
		return b, unmetf(remedyNoBPFFS, "no bpffs is mounted at %s, and one mounted by the agent would end with its container or unit, and the programs with it", b.Point)
	case slices.ContainsFunc(init, func(i Mount) bool { return i.Type == "bpf" && i.Device == m.Device }):
	case sits == contained:
		return b, unmetf(remedyPrivateBPFFS, "the bpffs at %s is this container's own and ends with it: the programs of a dead agent would be gone, "+
			"and its successor could not take them over", m.Point)
	default:
		b.Note = fmt.Sprintf("the bpffs at %s is in this mount namespace alone: if that ends with the agent, so do its programs, "+
			"and nothing guards a dead agent's node", m.Point)
	}
	return b, nil
}

// covering is the mount that a path is on: of the longest mount points above
// it, the last.
func covering(table []Mount, path string) (found Mount, ok bool) {
	for _, m := range table {
		if within(m.Point, path) && len(m.Point) >= len(found.Point) {
			found, ok = m, true
		}
	}
	return found, ok
}

// within says whether path is dir, or below it.
func within(dir, path string) bool {
	rel, err := filepath.Rel(dir, path)
	return err == nil && filepath.IsLocal(rel)
}

// Ensure mounts the bpffs if it is missing.
func (b BPFFS) Ensure() error {
	if !b.Missing {
		return nil
	}
	if err := unix.Mount(bpffsSource, b.Point, "bpf", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC|unix.MS_RELATIME, "mode=700"); err != nil {
		return fmt.Errorf("mounting a bpffs at %s: %w", b.Point, err)
	}
	return nil
}

// RemoveBPFFS unmounts the bpffs at BPFFSPoint if an agent has mounted it and
// nothing is pinned there any more.
func RemoveBPFFS() error { return here().removeBPFFS(BPFFSPoint) }

func (s system) removeBPFFS(point string) error {
	own, err := s.mounts(ownMounts)
	if err != nil {
		return err
	}
	m, ok := covering(own, point)
	if !ok || m.Point != point || m.Type != "bpf" || m.Source != bpffsSource {
		return nil
	}
	entries, err := os.ReadDir(point)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return nil
	case err != nil:
		return fmt.Errorf("looking for pins: %w", err)
	case slices.ContainsFunc(entries, func(e fs.DirEntry) bool { return !slices.Contains(preloaded, e.Name()) }):
		return nil
	}
	// Busy: somebody has it open at this moment, or works there.
	if err := unix.Unmount(point, unix.UMOUNT_NOFOLLOW); err != nil && !errors.Is(err, unix.EBUSY) {
		return fmt.Errorf("unmounting the bpffs at %s: %w", point, err)
	}
	return nil
}
