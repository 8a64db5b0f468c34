package intercept

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace that a goroutine of ours shall work in. In
// the agent there is but one; where a caller has entered another one on its
// own thread, what it starts must follow it there.
type namespace struct{ file *os.File }

// callersNamespace is that of the calling thread.
func callersNamespace() (namespace, error) {
	f, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return namespace{}, fmt.Errorf("opening the network namespace: %w", err)
	}
	return namespace{f}, nil
}

// enter moves the calling thread, which must be locked, into n and forgets n.
// Where it is there already no privilege is needed.
func (n namespace) enter() error {
	defer n.file.Close()
	var want, have unix.Stat_t
	if err := unix.Fstat(int(n.file.Fd()), &want); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if err := unix.Stat("/proc/thread-self/ns/net", &have); err != nil {
		return fmt.Errorf("network namespace: %w", err)
	}
	if want.Ino == have.Ino && want.Dev == have.Dev {
		return nil
	}
	if err := unix.Setns(int(n.file.Fd()), unix.CLONE_NEWNET); err != nil {
		return fmt.Errorf("entering the network namespace: %w", err)
	}
	return nil
}
