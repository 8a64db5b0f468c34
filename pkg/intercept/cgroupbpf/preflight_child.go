package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
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

// childMain waits until it is in its cgroup, which a byte on standard input says,
// and returns the errno of the connect, which is below 255, or 0.
func childMain(to string) int {
	if _, err := os.Stdin.Read(make([]byte, 1)); err != nil {
		return int(syscall.ECANCELED)
	}
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
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	err := runIn(cmd, cgroup.Name())
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		return fmt.Errorf("connecting to %s in a scratch cgroup: %w", to, syscall.Errno(exit.ExitCode()))
	case err != nil:
		return &noChild{err}
	}
	return nil
}

// runIn runs the child in a cgroup. It is moved there before it makes its socket:
// clone3, which could start it there, is not for containers.
func runIn(cmd *exec.Cmd, cgroup string) error {
	ready, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	err = os.WriteFile(filepath.Join(cgroup, "cgroup.procs"), []byte(strconv.Itoa(cmd.Process.Pid)), 0)
	if err == nil {
		_, err = ready.Write([]byte{0})
	}
	// Without its byte the child ends; its exit says less than err.
	return errors.Join(err, ready.Close(), cmd.Wait())
}

// noChild: no process could be started in the cgroup, so that nothing is known
// about connects there.
type noChild struct{ err error }

func (e *noChild) Error() string {
	return fmt.Sprintf("starting a process in a scratch cgroup: %v", e.err)
}
func (e *noChild) Unwrap() error { return e.err }
