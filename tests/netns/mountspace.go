package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"

	"golang.org/x/sys/unix"
)

// bpffsPoint is where everybody expects the file system of BPF pins.
const bpffsPoint = "/sys/fs/bpf"

// mountSpace is a mount namespace with a bpffs of its own. It lives as long as
// somebody has it open or runs in it.
type mountSpace struct{ ns, bpffs *os.File }

// BPFFS is the lab's bpffs (see Cmd.BPFFS) as processes see it that are not in
// its mount namespace.
func (l *Lab) BPFFS() (string, error) {
	m, err := l.mountSpace()
	if err != nil {
		return "", err
	}
	return fmt.Sprintf("/proc/%d/fd/%d/.", os.Getpid(), m.bpffs.Fd()), nil
}

// mountSpace is the lab's, made when it is first asked for.
func (l *Lab) mountSpace() (*mountSpace, error) {
	l.mounts.once.Do(func() {
		l.mounts.err = onThread(func() error {
			var err error
			l.mounts.space, err = newMountSpace()
			return err
		})
	})
	if l.mounts.space == nil && l.mounts.err == nil {
		return nil, fmt.Errorf("netns: the lab is closed: %w", os.ErrClosed)
	}
	return l.mounts.space, l.mounts.err
}

// newMountSpace moves the calling thread into the new namespace for ever.
func newMountSpace() (*mountSpace, error) {
	if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
		return nil, fmt.Errorf("netns: a mount namespace: %w", err)
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return nil, fmt.Errorf("netns: making mounts private: %w", err)
	}
	if err := unix.Mount("bpf", bpffsPoint, "bpf", 0, "mode=0700"); err != nil {
		return nil, fmt.Errorf("netns: mounting a bpffs: %w", err)
	}
	ns, err := os.Open("/proc/thread-self/ns/mnt")
	if err != nil {
		return nil, err
	}
	bpffs, err := os.Open(bpffsPoint)
	if err != nil {
		return nil, errors.Join(err, ns.Close())
	}
	return &mountSpace{ns, bpffs}, nil
}

// start starts cmd in the namespace, from a thread that is thrown away.
func (m *mountSpace) start(cmd *exec.Cmd) error {
	if cmd.Dir == "" {
		var err error
		if cmd.Dir, err = os.Getwd(); err != nil { // setns goes to the root
			return err
		}
	}
	if err := unix.Unshare(unix.CLONE_FS); err != nil {
		return fmt.Errorf("netns: leaving the process's file system view: %w", err)
	}
	if err := unix.Setns(int(m.ns.Fd()), unix.CLONE_NEWNS); err != nil {
		return fmt.Errorf("netns: entering the lab's mount namespace: %w", err)
	}
	return cmd.Start()
}

func (m *mountSpace) close() error { return errors.Join(m.bpffs.Close(), m.ns.Close()) }
