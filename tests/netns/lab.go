package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Where a Lab leaves what must be found by name once its process is dead.
const (
	lockDir  = "/run/kasway-lab"
	netnsDir = "/run/netns"
	prefix   = "kwlab-"
)

var labs atomic.Int64

// Lab is a set of network namespaces. Its methods may be called concurrently.
type Lab struct {
	// Name is unique on the machine and starts the name of every namespace.
	Name string

	lock   *os.File // held as long as the lab lives; a sweep takes it over
	cgroup string   // "" where there is no writable cgroup v2

	mounts struct {
		once  sync.Once
		space *mountSpace
		err   error
	}

	mu     sync.Mutex
	hosts  []*Host
	cmds   []*Cmd
	closed bool
}

// Open makes an empty Lab after sweeping away those of dead processes. The
// caller closes it.
func Open() (*Lab, error) {
	if err := Sweep(); err != nil {
		return nil, err
	}
	name := fmt.Sprintf("%s%d-%d", prefix, os.Getpid(), labs.Add(1))
	lock, err := lockFile(filepath.Join(lockDir, name), unix.LOCK_EX)
	if err != nil {
		return nil, fmt.Errorf("netns: locking %s: %w", name, err)
	}
	l := &Lab{Name: name, lock: lock}
	if root, err := CgroupRoot(); err == nil {
		dir := filepath.Join(root, name)
		if os.Mkdir(dir, 0o755) == nil {
			l.cgroup = dir
		}
	}
	return l, nil
}

// lockFile opens and locks path; the lock ends with this process however it
// dies, and is not inherited by children. A sweep may find the file before its
// maker has locked it, and remove it: then it is made again.
func lockFile(path string, how int) (*os.File, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return nil, err
	}
	for {
		f, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := unix.Flock(int(f.Fd()), how); err != nil {
			return nil, errors.Join(err, f.Close())
		}
		locked, err := f.Stat()
		if named, nerr := os.Stat(path); err == nil && nerr == nil && os.SameFile(locked, named) {
			return f, nil
		}
		if err := errors.Join(err, f.Close()); err != nil {
			return nil, err
		}
	}
}

// Sweep removes the namespaces, cgroups and processes of labs whose process
// has died. It leaves living labs alone.
func Sweep() error {
	locks, err := filepath.Glob(filepath.Join(lockDir, prefix+"*"))
	if err != nil {
		return err
	}
	var errs []error
	for _, path := range locks {
		lock, err := lockFile(path, unix.LOCK_EX|unix.LOCK_NB)
		if err != nil {
			continue // alive, or swept by somebody else at this moment
		}
		errs = append(errs, removeByName(filepath.Base(path)), os.Remove(path), lock.Close())
	}
	return errors.Join(errs...)
}

// removeByName removes what a lab of this name has left in the system.
func removeByName(name string) error {
	var errs []error
	if root, err := CgroupRoot(); err == nil {
		errs = append(errs, removeCgroup(filepath.Join(root, name)))
	}
	errs = append(errs, removeCPUGroup(name))
	spaces, _ := filepath.Glob(filepath.Join(netnsDir, name+"-*"))
	for _, path := range spaces {
		errs = append(errs, deleteNetns(filepath.Base(path)))
	}
	return errors.Join(errs...)
}

func deleteNetns(name string) error {
	err := vns.DeleteNamed(name)
	if errors.Is(err, unix.EINVAL) {
		// Not a mount: its maker died between creating the file and mounting.
		err = os.Remove(filepath.Join(netnsDir, name))
	}
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("netns: removing %s: %w", name, err)
	}
	return nil
}

// Close ends every process started in the lab and removes its namespaces.
// Sockets that the caller still has open keep their namespace alive, unnamed,
// until they are closed. A second Close does nothing.
func (l *Lab) Close() error {
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return nil
	}
	l.closed = true
	hosts, cmds := l.hosts, l.cmds
	l.mu.Unlock()

	for _, c := range cmds {
		c.kill()
	}
	var errs []error
	for _, h := range hosts {
		errs = append(errs, h.close())
	}
	l.mounts.once.Do(func() {})
	if l.mounts.space != nil {
		errs = append(errs, l.mounts.space.close())
	}
	errs = append(errs, removeByName(l.Name), os.Remove(l.lock.Name()), l.lock.Close())
	return errors.Join(errs...)
}

// Poll calls f until it returns nil, and gives its last error after the
// time-out: for conditions that the kernel announces by no event.
func Poll(timeout time.Duration, f func() error) error {
	deadline := time.Now().Add(timeout)
	for {
		err := f()
		if err == nil || time.Now().After(deadline) {
			return err
		}
		time.Sleep(10 * time.Millisecond)
	}
}
