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

// group is the node's control group. Whoever attaches something to it in cgroup 2
// sees the node's own processes and its pods, and nothing else of the machine.
func (n *Node) group() string { return prefix + "/" + n.Name }

// unit is the group of one of the node's units.
func (n *Node) unit(name string) string { return n.group() + "/" + name }

// Cgroup is the folder of the node's group.
func (n *Node) Cgroup() string { return filepath.Join(cgroup2(), n.group()) }

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

// cgroupsUp makes a node's group in every hierarchy: the kubelet is told to stay
// below it, and insists that it exists.
func cgroupsUp(group string) error {
	all, err := hierarchies()
	if err != nil {
		return err
	}
	for _, h := range all {
		if err := os.MkdirAll(filepath.Join(h, group), 0o755); err != nil {
			return err
		}
		for _, dir := range []string{prefix, group} {
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
