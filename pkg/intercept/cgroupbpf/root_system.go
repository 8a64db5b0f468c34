package cgroupbpf

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// The mount tables that are read: one's own, and that of process 1.
const (
	ownMounts  = "/proc/self/mountinfo"
	initMounts = "/proc/1/mountinfo"
)

// system is what detection asks of the machine; tests answer instead.
type system struct {
	// open opens a mount table.
	open func(name string) (io.ReadCloser, error)
	// look looks at a directory.
	look func(path string) (directory, error)
}

// seat is how much of the file system a process shares with process 1.
type seat int

const (
	// withInit: the mount namespace. Where process 1 is a container's own, that
	// says nothing.
	withInit seat = iota
	// apart: the root, in a mount namespace of its own.
	apart
	// contained: nothing, as in a container.
	contained
)

// here is this machine.
func here() system {
	return system{
		open: func(name string) (io.ReadCloser, error) { return os.Open(name) },
		look: look,
	}
}

func (s system) mounts(table string) ([]Mount, error) {
	f, err := s.open(table)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	return ParseMounts(f)
}

// look asks the kernel what path is.
func look(path string) (d directory, err error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(path, &fs); err != nil {
		return d, &os.PathError{Op: "statfs", Path: path, Err: err}
	}
	var st unix.Stat_t
	if err := unix.Stat(path, &st); err != nil {
		return d, &os.PathError{Op: "stat", Path: path, Err: err}
	}
	if int64(fs.Type) != unix.CGROUP2_SUPER_MAGIC || st.Mode&unix.S_IFMT != unix.S_IFDIR {
		return d, nil
	}
	d.cgroup2, d.inode = true, st.Ino
	if d.child, err = has(path, "cgroup.type"); err != nil {
		return d, err
	}
	alive, err := has(path, "cgroup.procs")
	d.dead = !alive
	return d, err
}

func has(dir, file string) (bool, error) {
	err := unix.Access(filepath.Join(dir, file), unix.F_OK)
	switch {
	case err == nil:
		return true, nil
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ENODEV):
		return false, nil
	}
	return false, &os.PathError{Op: "access", Path: filepath.Join(dir, file), Err: err}
}

// sameNamespace compares one of this process's namespaces with process 1's.
func sameNamespace(kind string) (bool, error) {
	own, err := os.Readlink("/proc/self/ns/" + kind)
	if err != nil {
		return false, fmt.Errorf("own %s namespace: %w", kind, err)
	}
	init, err := os.Readlink("/proc/1/ns/" + kind)
	if err != nil {
		return false, fmt.Errorf("%s namespace of process 1: %w", kind, err)
	}
	return own == init, nil
}

// seatOf compares the mount tables of this process and of process 1. They may
// be read where the links below /proc/1/ns may not.
func seatOf(own, init []Mount) seat {
	a, _ := covering(own, "/")
	b, _ := covering(init, "/")
	switch {
	case a.ID == b.ID:
		return withInit
	case a.Device == b.Device && a.Root == b.Root:
		return apart
	}
	return contained
}
