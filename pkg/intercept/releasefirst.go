package intercept

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// FirstReleased is the lowest descriptor of sockets that must end before those
// of all carried connections when this process is killed. The kernel's table
// for as many descriptors takes 128 KiB.
const FirstReleased = 1 << 14

// ReleaseFirst arranges that, if this process is killed, the kernel releases
// the socket of c before those of the connections that it carries. What takes
// connections must end first: a client whose connection was cut dials again at
// once, and would be accepted by a listener that is about to be closed, and cut
// a second time (seen up to 33 ms after the kill).
//
// It holds the socket by a second, high descriptor: a dying process's files are
// released from the highest down (task_work_run of Linux 4.3 and later). Call
// release before c is closed, or the socket stays open. Where the process may
// not have such a descriptor nothing is arranged, and release does nothing.
func ReleaseFirst(c syscall.Conn) (release func(), err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("keeping a socket by a high descriptor: %w", err)
	}
	high := -1
	err = raw.Control(func(fd uintptr) {
		if d, err := unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, FirstReleased); err == nil {
			high = d
		}
	})
	if err != nil {
		return nil, fmt.Errorf("keeping a socket by a high descriptor: %w", err)
	}
	return func() {
		if high >= 0 {
			_ = unix.Close(high) // the socket lives on in c
			high = -1
		}
	}, nil
}
