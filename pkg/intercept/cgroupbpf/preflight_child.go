package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"syscall"
	"time"
)

// childName is the name under which a program that holds this package makes one
// connection and ends. A socket belongs for ever to the cgroup of the process
// that made it, so a connect in a scratch cgroup needs a process there.
const childName = "kasway-connect"

// childTimeout bounds the connect.
const childTimeout = time.Second

func init() {
	if len(os.Args) == 2 && os.Args[0] == childName {
		os.Exit(childMain(os.Args[1]))
	}
}

// childMain returns the errno of the connect, which is below 255, or 0.
func childMain(to string) int {
	d := net.Dialer{Timeout: childTimeout}
	d.SetMultipathTCP(false)
	c, err := d.DialContext(context.Background(), "tcp", to)
	if err == nil {
		_ = c.Close() // it has arrived, or not: the listener knows
		return 0
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return int(errno)
	}
	return int(syscall.ETIMEDOUT)
}

// connectFrom connects to an address from a new process in the cgroup, in the
// network namespace of the calling thread.
func connectFrom(ctx context.Context, cgroup *os.File, to netip.AddrPort) error {
	cmd := exec.CommandContext(ctx, "/proc/self/exe", to.String())
	cmd.Args[0] = childName
	cmd.Env = []string{}
	// The death signal comes when the thread ends: the caller's is locked.
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(cgroup.Fd()), Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return fmt.Errorf("connecting to %s in a scratch cgroup: %w", to, syscall.Errno(exit.ExitCode()))
	case err != nil:
		return &noChild{err}
	}
	return nil
}

// noChild: no process could be started in the cgroup, so that nothing is known
// about connects there.
type noChild struct{ err error }

func (e *noChild) Error() string {
	return fmt.Sprintf("starting a process in a scratch cgroup: %v", e.err)
}
func (e *noChild) Unwrap() error { return e.err }
