package main

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strings"
	"syscall"

	"github.com/coreos/go-systemd/v22/daemon"
	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/agent"
)

// successorEnv is set in a process that a running agent has started to take its
// place.
const successorEnv = "KASWAY_SUCCESSOR"

// reloads gets something for each SIGHUP, and spawn starts what is to follow
// this process. Both are nil where the end of this process would take that with
// it (the first process of a container) or where SIGHUP means something else
// (nohup, and a terminal that is closed).
func reloads() (signals <-chan os.Signal, spawn func() (agent.Child, error), stop func()) {
	stop = func() {}
	if signal.Ignored(syscall.SIGHUP) || onTerminal() {
		return nil, nil, stop
	}
	c := make(chan os.Signal, 1)
	signal.Notify(c, syscall.SIGHUP)
	stop = func() { signal.Stop(c) }
	if os.Getpid() == 1 {
		return c, nil, stop
	}
	self, err := ownPath(os.Args[0])
	if err != nil {
		return c, func() (agent.Child, error) { return agent.Child{}, err }, stop
	}
	return c, func() (agent.Child, error) { return startSuccessor(self) }, stop
}

func onTerminal() bool {
	_, err := unix.IoctlGetTermios(int(os.Stdin.Fd()), unix.TCGETS)
	return err == nil
}

// ownPath is where this binary was found, and not what it was: the file, or a
// link on the way to it, may be another one by the time that it is run again.
func ownPath(arg0 string) (string, error) {
	found, err := exec.LookPath(arg0)
	if err != nil {
		return "", fmt.Errorf("looking for this binary: %w", err)
	}
	if found, err = filepath.Abs(found); err != nil {
		return "", fmt.Errorf("looking for this binary: %w", err)
	}
	return found, nil
}

// startSuccessor runs the binary with this process's arguments, environment and
// log.
func startSuccessor(binary string) (agent.Child, error) {
	cmd := exec.Command(binary, os.Args[1:]...)
	cmd.Args[0] = os.Args[0]
	cmd.Env = append(os.Environ(), successorEnv+"=1")
	cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
	if err := cmd.Start(); err != nil {
		return agent.Child{}, err
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	return agent.Child{PID: cmd.Process.Pid, Ended: ended, Stop: func() { _ = cmd.Process.Signal(syscall.SIGTERM) }}, nil
}

// manager tells systemd, if it is there, what becomes of the agent.
func manager(log logrus.FieldLogger) agent.Manager {
	return func(states ...string) {
		_, err := daemon.SdNotify(false, strings.Join(states, "\n"))
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			log.WithError(err).Warn("the service manager cannot be told")
		}
	}
}
