package netns

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Starve leaves the process next to no CPU time until release is called: a
// thousandth of one CPU, in pieces that are seconds apart. Unlike SIGSTOP it may
// run a little now and then, anywhere in its code. It uses the cpu controller of
// cgroups, of version 1 or 2, whichever the machine has.
func (c *Cmd) Starve() (release func() error, err error) {
	if dir, ok := cpuV1(); ok {
		return c.starveV1(filepath.Join(dir, c.host.lab.Name))
	}
	limit := filepath.Join(c.CgroupPath(), "cpu.max")
	if err := os.WriteFile(limit, []byte("1000 1000000"), 0); err != nil {
		return nil, fmt.Errorf("netns: starving %s: neither cgroup v1 nor the parent of its cgroup has the cpu controller: %w", c, err)
	}
	return func() error { return os.WriteFile(limit, []byte("max"), 0) }, nil
}

// cpuV1 is where the cpu controller of cgroup v1 is mounted.
func cpuV1() (dir string, ok bool) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", false
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 3 && f[2] == "cgroup" && slices.Contains(strings.Split(f[3], ","), "cpu") {
			return f[1], true
		}
	}
	return "", false
}

// starveV1 moves the process into the group dir of its own, and back.
func (c *Cmd) starveV1(dir string) (release func() error, err error) {
	if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
		return nil, fmt.Errorf("netns: starving %s: %w", c, err)
	}
	pid := strconv.Itoa(c.Process.Pid)
	group, err := ownCPUGroup(pid)
	if err != nil {
		return nil, err
	}
	root, _ := cpuV1()
	release = func() error { return emptyCPUGroup(dir, filepath.Join(root, group)) }
	for _, w := range [][2]string{{"cpu.cfs_period_us", "1000000"}, {"cpu.cfs_quota_us", "1000"}, {"cgroup.procs", pid}} {
		if err := os.WriteFile(filepath.Join(dir, w[0]), []byte(w[1]), 0); err != nil {
			return nil, errors.Join(fmt.Errorf("netns: starving %s: %w", c, err), release())
		}
	}
	return release, nil
}

// emptyCPUGroup moves everything in dir, children that were made there too, to
// the group to, and removes dir.
func emptyCPUGroup(dir, to string) error {
	return Poll(5*time.Second, func() error {
		pids, err := os.ReadFile(filepath.Join(dir, "cgroup.procs"))
		if err != nil {
			return err
		}
		for _, pid := range strings.Fields(string(pids)) {
			// One that has ended meanwhile cannot be moved, and need not be.
			_ = os.WriteFile(filepath.Join(to, "cgroup.procs"), []byte(pid), 0)
		}
		return os.Remove(dir)
	})
}

// ownCPUGroup is the process's group in the hierarchy of the cpu controller.
func ownCPUGroup(pid string) (string, error) {
	groups, err := os.ReadFile("/proc/" + pid + "/cgroup")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(groups)) {
		f := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(f) == 3 && slices.Contains(strings.Split(f[1], ","), "cpu") {
			return f[2], nil
		}
	}
	return "", fmt.Errorf("netns: process %s is in no group of the cpu controller", pid)
}

// removeCPUGroup removes what a dead lab has left of Starve. Its processes are
// dead by then.
func removeCPUGroup(lab string) error {
	root, ok := cpuV1()
	if !ok {
		return nil
	}
	if err := os.Remove(filepath.Join(root, lab)); err != nil && !errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("netns: removing the cpu group of %s: %w", lab, err)
	}
	return nil
}
