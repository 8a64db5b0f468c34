package observe

import (
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"
)

// OwnSocket is the one of Sockets(path) whose process runs in the container of
// the caller, and path where there is no such or more than one. What a probe
// asks in a pod is that pod's agent and not the newest, which path leads to:
// while that starts, an old pod would be taken for unready.
//
// The process must be within sight, which those of other containers are not,
// and be in the caller's cgroup, as all that is executed in a container is.
func OwnSocket(path string) string {
	return ownSocket(path, listener, func(pid string) (string, error) {
		b, err := os.ReadFile("/proc/" + pid + "/cgroup")
		return string(b), err
	})
}

func ownSocket(path string, listener func(socket string) (pid int, err error), cgroup func(pid string) (string, error)) string {
	own, err := cgroup("self")
	sockets, gerr := filepath.Glob(generationSocket(path, "*"))
	if err != nil || gerr != nil {
		return path
	}
	var found []string
	for _, s := range sockets {
		pid, err := listener(s)
		if err != nil || pid <= 0 {
			continue
		}
		if in, err := cgroup(fmt.Sprint(pid)); err == nil && in == own {
			found = append(found, s)
		}
	}
	if len(found) != 1 {
		return path
	}
	return found[0]
}

// listener is the process that listens on a socket; 0: it is not within sight.
func listener(socket string) (pid int, err error) {
	c, err := net.DialTimeout("unix", socket, time.Second)
	if err != nil {
		return 0, err
	}
	defer c.Close()
	raw, err := c.(*net.UnixConn).SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	cerr := raw.Control(func(fd uintptr) { cred, err = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	if err = errors.Join(cerr, err); err != nil {
		return 0, err
	}
	return int(cred.Pid), nil
}
