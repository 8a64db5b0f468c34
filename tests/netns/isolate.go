package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"syscall"

	"github.com/vishvananda/netlink"
)

// isolatedEnv marks the run that Isolate has made.
const isolatedEnv = "KASWAY_TEST_ISOLATED"

// Isolate runs the test binary once more in a network namespace of its own with
// lo up, so that every goroutine of what is tested is in it, and exits with that
// run's exit code. It returns in that run, and where namespaces cannot be made:
// tests that need one begin with Require. It is for the beginning of TestMain.
func Isolate() {
	if os.Getenv(isolatedEnv) != "" {
		if err := loUp(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		return
	}
	if Available() != nil {
		return
	}
	// The child is killed when the thread that started it ends.
	runtime.LockOSThread()
	cmd := exec.Command("/proc/self/exe", os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), isolatedEnv+"=1")
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWNET, Pdeathsig: syscall.SIGKILL}
	err := cmd.Run()
	var exit *exec.ExitError
	switch {
	case err == nil:
		os.Exit(0)
	case errors.As(err, &exit) && exit.ExitCode() > 0:
		os.Exit(exit.ExitCode())
	}
	fmt.Fprintf(os.Stderr, "netns: running the tests in a namespace of their own: %v\n", err)
	os.Exit(1)
}

func loUp() error {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return fmt.Errorf("netns: looking for lo: %w", err)
	}
	if err := netlink.LinkSetUp(lo); err != nil {
		return fmt.Errorf("netns: setting lo up: %w", err)
	}
	return nil
}
