package netns

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
)

// Cmd is an exec.Cmd that starts in a Host's namespace. Start, Run and Wait
// are its own; everything else of exec.Cmd works as usual, except that Output
// and CombinedOutput must not be used (Host.Run is there for that).
type Cmd struct {
	*exec.Cmd
	host   *Host
	cgroup string

	once sync.Once
	err  error
	done chan struct{}
}

// Command prepares a process inside the namespace. It runs in the lab's own
// cgroup and ends with the lab at the latest.
func (h *Host) Command(name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.Command(name, args...), host: h, cgroup: "procs", done: make(chan struct{})}
}

// Cgroup puts the process into the lab's sub-cgroup of this name, which is
// made when it starts.
func (c *Cmd) Cgroup(name string) *Cmd {
	c.cgroup = name
	return c
}

// CgroupPath is the directory of the process's cgroup; "" where the machine
// has no writable cgroup v2.
func (c *Cmd) CgroupPath() string {
	if c.host.lab.cgroup == "" {
		return ""
	}
	return filepath.Join(c.host.lab.cgroup, c.cgroup)
}

// Start starts the process from a thread in the namespace.
func (c *Cmd) Start() error {
	l := c.host.lab
	l.mu.Lock()
	if l.closed {
		l.mu.Unlock()
		return fmt.Errorf("netns: starting %s: the lab is closed", c)
	}
	l.cmds = append(l.cmds, c)
	l.mu.Unlock()
	if dir := c.CgroupPath(); dir != "" {
		// Its parent is gone if the lab is being closed, and must not come back.
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return fmt.Errorf("netns: cgroup of %s: %w", c, err)
		}
		fd, err := os.Open(dir)
		if err != nil {
			return fmt.Errorf("netns: cgroup of %s: %w", c, err)
		}
		defer fd.Close()
		if c.SysProcAttr == nil {
			c.SysProcAttr = &syscall.SysProcAttr{}
		}
		c.SysProcAttr.UseCgroupFD, c.SysProcAttr.CgroupFD = true, int(fd.Fd())
	}
	return c.host.Do(c.Cmd.Start)
}

// Run starts the process and waits for its end.
func (c *Cmd) Run() error {
	if err := c.Start(); err != nil {
		return err
	}
	return c.Wait()
}

// Wait waits for the end of the process. It may be called any number of times.
func (c *Cmd) Wait() error {
	c.once.Do(func() {
		c.err = c.Cmd.Wait()
		close(c.done)
	})
	<-c.done
	return c.err
}

// Signal sends s to the process, unless it has been waited for.
func (c *Cmd) Signal(s os.Signal) error { return c.Process.Signal(s) }

func (c *Cmd) kill() {
	if c.Process == nil {
		return
	}
	// Fails on a process that has ended, as it should.
	_ = c.Process.Kill()
	_ = c.Wait()
}
