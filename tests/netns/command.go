package netns

import (
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
	mounts bool

	once sync.Once
	err  error
	done chan struct{}
}

// Command prepares a process inside the namespace. It runs in the cgroup of the
// host's clients and ends with the lab at the latest.
func (h *Host) Command(name string, args ...string) *Cmd {
	return &Cmd{Cmd: exec.Command(name, args...), host: h, cgroup: h.clients, done: make(chan struct{})}
}

// Cgroup puts the process into another cgroup of the host, such as AgentUnit,
// which is made when it starts.
func (c *Cmd) Cgroup(name string) *Cmd {
	c.cgroup = name
	return c
}

// CgroupPath is the directory of the process's cgroup; "" where the machine
// has no writable cgroup v2.
func (c *Cmd) CgroupPath() string { return join(c.host.Cgroup(), c.cgroup) }

// BPFFS starts the process in the lab's own mount namespace, in which a bpffs
// of the lab's own is mounted at /sys/fs/bpf: what is pinned there outlives the
// process and ends with the lab.
func (c *Cmd) BPFFS() *Cmd {
	c.mounts = true
	return c
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
	dir, err := l.mkdirCgroup(filepath.Join(c.host.base, c.cgroup))
	if err != nil {
		return fmt.Errorf("netns: starting %s: %w", c, err)
	}
	if dir != "" {
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
	if !c.mounts {
		return c.host.Do(c.Cmd.Start)
	}
	m, err := l.mountSpace()
	if err != nil {
		return fmt.Errorf("netns: starting %s: %w", c, err)
	}
	return c.host.Do(func() error { return m.start(c.Cmd) })
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
