package bed

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

const cgroupRoot = "/sys/fs/cgroup"

// The node's control groups of cgroup 2. Whoever attaches something to nodeGroup
// sees the node's own processes and its pods, and nothing else of the machine.
const (
	nodeGroup  = prefix + "/" + NodeName
	hostGroup  = nodeGroup + "/host"  // kubelet, kube-proxy, and whoever plays a host process
	agentGroup = nodeGroup + "/agent" // Kasway's agent
)

// cgroup2 is where cgroup 2 is mounted: alone, or beside version 1.
func cgroup2() string {
	if _, err := os.Stat(cgroupRoot + "/cgroup.controllers"); err == nil {
		return cgroupRoot
	}
	return cgroupRoot + "/unified"
}

// hierarchies are the mount points of all control group hierarchies.
func hierarchies() ([]string, error) {
	if cgroup2() == cgroupRoot {
		return []string{cgroupRoot}, nil
	}
	dirs, err := filepath.Glob(cgroupRoot + "/*/cgroup.procs")
	for i, d := range dirs {
		dirs[i] = filepath.Dir(d)
	}
	return dirs, err
}

// cgroupsUp makes the node's group in every hierarchy: the kubelet is told to
// stay below it, and insists that it exists.
func cgroupsUp() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := os.MkdirAll(filepath.Join(h, nodeGroup), 0o755); err != nil {
			return err
		}
		for _, dir := range []string{prefix, nodeGroup} {
			if err := prepareGroup(h, filepath.Join(h, dir)); err != nil {
				return err
			}
		}
	}
	return nil
}

// prepareGroup does what a new group needs before it can hold anything: version
// 1 of cpuset starts empty, and version 2 has no controllers unless the parent
// hands them on.
func prepareGroup(root, dir string) error {
	for _, f := range []string{"cpuset.cpus", "cpuset.mems"} {
		all, err := os.ReadFile(filepath.Join(root, f))
		if errors.Is(err, fs.ErrNotExist) {
			continue // another controller, or version 2
		}
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(dir, f), all, 0); err != nil {
			return err
		}
	}
	has, err := os.ReadFile(filepath.Join(filepath.Dir(dir), "cgroup.controllers"))
	if errors.Is(err, fs.ErrNotExist) {
		return nil // version 1
	}
	if err != nil {
		return err
	}
	for _, c := range strings.Fields(string(has)) {
		// Not every controller can be handed on everywhere; the kubelet names
		// the one that it misses.
		_ = os.WriteFile(filepath.Join(filepath.Dir(dir), "cgroup.subtree_control"), []byte("+"+c), 0)
	}
	return nil
}

// cgroupsDown removes the bed's groups, which are empty once its processes have
// ended; the kernel may take a moment to see that.
func cgroupsDown() error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	var left error
	for range 100 {
		left = nil
		for _, h := range all {
			left = errors.Join(left, removeGroups(filepath.Join(h, prefix)))
		}
		if left == nil {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return fmt.Errorf("removing control groups: %w", left)
}

// removeGroups removes a group and all below it, the deepest first.
func removeGroups(root string) error {
	var dirs []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.IsDir() {
			dirs = append(dirs, path)
		}
		return nil // a group that vanishes meanwhile is what is wanted
	})
	slices.Reverse(dirs)
	for _, d := range dirs {
		if e := os.Remove(d); e != nil && !errors.Is(e, fs.ErrNotExist) {
			err = errors.Join(err, e)
		}
	}
	return err
}
