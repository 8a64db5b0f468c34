package cgroupbpf

import (
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kasway/kasway/pkg/intercept"
)

// Auto is the setting of intercept.cgroup that stands for the true root.
const Auto = "auto"

// rootInode is that of the directory at the top of the tree of cgroups, and of
// no other. A cgroup namespace shows another directory in its place.
const rootInode = 1

// initRoot is the file system of process 1, which is the host's for whoever
// shares its pid namespace.
const initRoot = "/proc/1/root"

// Root is the cgroup that programs are attached to.
type Root struct {
	// Path is its directory.
	Path string
	// ID is the cgroup's id, which is the inode of its directory.
	ID uint64
	// True: it is the root of all cgroups, so that every process of the machine
	// is below it.
	True bool
	// Passed says of every other place that was looked at why it was not taken.
	Passed []string
}

// String says what a user should know of it.
func (r Root) String() string {
	if r.True {
		return fmt.Sprintf("%s (id %d, the root of all cgroups)", r.Path, r.ID)
	}
	return fmt.Sprintf("%s (id %d, not the root: only what runs below it is diverted)", r.Path, r.ID)
}

// unmet is a need that this node does not meet, and what to do about it.
type unmet struct {
	err    error
	remedy string
}

func (u *unmet) Error() string { return u.err.Error() }
func (u *unmet) Unwrap() error { return u.err }

func unmetf(remedy, format string, a ...any) *unmet {
	r := intercept.NotSupported(remedy, format, a...)
	return &unmet{r.Err, r.Remedy}
}

// Remedies of what FindRoot may find.
const (
	remedyRoot = "give the agent the node's whole tree of cgroups: hostPath /sys/fs/cgroup in a pod (hostPID works too), " +
		"or run it outside of the container; or name a cgroup with intercept.cgroup, below which alone is diverted"
	remedyNone = "boot the node with cgroup 2 (systemd.unified_cgroup_hierarchy=1 or hybrid), or mount it: " +
		"mount -t cgroup2 none /sys/fs/cgroup/unified"
)

// FindRoot finds where to attach: the true root for Auto, else the directory
// that setting names. An error wraps intercept.ErrNotSupported, unless it could
// not be found out.
func FindRoot(setting string) (Root, error) { return here().findRoot(setting) }

func (s system) findRoot(setting string) (Root, error) {
	if setting == "" || setting == Auto {
		return s.findTrueRoot()
	}
	return s.namedRoot(setting)
}

// findTrueRoot looks at every mount of cgroup 2, its own first: those of
// process 1 need hostPID.
func (s system) findTrueRoot() (Root, error) {
	own, err := s.mounts(ownMounts)
	if err != nil {
		return Root{}, err
	}
	places := cgroupPoints(own)
	var passed []string
	if init, err := s.mounts(initMounts); err != nil {
		passed = append(passed, fmt.Sprintf("the mounts of process 1: %v", err))
	} else if !slices.Equal(own, init) {
		for _, p := range cgroupPoints(init) {
			places = append(places, filepath.Join(initRoot, p))
		}
	}
	for i, p := range places {
		d, err := s.look(p)
		why := d.notRoot()
		if err != nil {
			why = err.Error()
		}
		if why == "" {
			for _, more := range places[i+1:] {
				passed = append(passed, more+": not needed")
			}
			return Root{Path: p, ID: d.inode, True: true, Passed: passed}, nil
		}
		passed = append(passed, p+": "+why)
	}
	if len(places) == 0 {
		return Root{}, unmetf(remedyNone, "%s", strings.Join(append([]string{"cgroup 2 is mounted nowhere"}, passed...), "; "))
	}
	return Root{}, unmetf(remedyRoot, "the root of all cgroups is not in sight, and programs attached to a part of the tree divert nothing but what runs there: %s", strings.Join(passed, "; "))
}

// namedRoot looks at the directory of the configuration.
func (s system) namedRoot(path string) (Root, error) {
	d, err := s.look(path)
	switch {
	case errors.Is(err, fs.ErrNotExist):
		return Root{}, unmetf("make the cgroup before the agent starts, or set intercept.cgroup: auto", "intercept.cgroup: %v", err)
	case err != nil:
		return Root{}, fmt.Errorf("intercept.cgroup: %w", err)
	case !d.cgroup2:
		remedy := "name a directory of cgroup 2, or set intercept.cgroup: auto"
		if table, err := s.mounts(ownMounts); err == nil {
			if at := cgroupPoints(table); len(at) > 0 {
				remedy = "name a directory below " + strings.Join(at, " or ") + ", or set intercept.cgroup: auto"
			} else {
				remedy = remedyNone
			}
		}
		return Root{}, unmetf(remedy, "intercept.cgroup: %s is no directory of cgroup 2", path)
	case d.dead:
		return Root{}, unmetf("make the cgroup before the agent starts, or set intercept.cgroup: auto",
			"intercept.cgroup: %s has been removed: nothing can run there", path)
	}
	return Root{Path: path, ID: d.inode, True: d.notRoot() == ""}, nil
}

// cgroupPoints are the places where cgroup 2 is mounted, once each.
func cgroupPoints(table []Mount) (points []string) {
	for _, m := range table {
		if m.Type == "cgroup2" && !slices.Contains(points, m.Point) {
			points = append(points, m.Point)
		}
	}
	return points
}

// directory is what a look at a directory shows.
type directory struct {
	cgroup2 bool // else nothing below is known
	inode   uint64
	// child: it has a file that the true root lacks. dead: it has been removed
	// and lives on as a mount or an open file, without any file in it.
	child, dead bool
}

// notRoot says why d is not the true root; "" if it is.
func (d directory) notRoot() string {
	switch {
	case !d.cgroup2:
		return "another file system is mounted over it"
	case d.dead:
		return fmt.Sprintf("a cgroup that has been removed (inode %d)", d.inode)
	case d.inode != rootInode:
		return fmt.Sprintf("only a part of the tree, as a cgroup namespace or a bind mount shows it (inode %d)", d.inode)
	case d.child:
		return "only a part of the tree: it has a file cgroup.type, and the root has none"
	}
	return ""
}
