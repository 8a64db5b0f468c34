package netns

import (
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Cgroups of a node below its own, as systemd makes them.
const (
	// KubeletUnit is where the clients of the node itself run.
	KubeletUnit = "system.slice/kubelet.service"
	// AgentUnit is where an agent runs, by Cmd.Cgroup.
	AgentUnit = "system.slice/kasway-agent.service"
)

// CgroupRoot is the mount point of cgroup v2.
func CgroupRoot() (string, error) {
	mounts, err := os.ReadFile("/proc/self/mounts")
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(mounts)) {
		if f := strings.Fields(line); len(f) > 3 && f[2] == "cgroup2" {
			return f[1], nil
		}
	}
	return "", fmt.Errorf("netns: no cgroup v2 is mounted: %w", os.ErrNotExist)
}

// NodeCgroup is the directory below which everything on the node runs, pods
// included, and nothing else does: where connect hooks are attached. It is ""
// where the machine has no writable cgroup v2.
func (t *Topology) NodeCgroup() string { return t.Node.Cgroup() }

// CgroupPath is the directory of the cgroup of the host's clients: of what it
// dials, and of its commands that have no other (see Cmd.Cgroup). It is ""
// where the machine has no writable cgroup v2.
func (h *Host) CgroupPath() string { return join(h.Cgroup(), h.clients) }

// Cgroup is the directory below which everything of the host runs.
func (h *Host) Cgroup() string { return join(h.lab.cgroup, h.base) }

func join(dir, name string) string {
	if dir == "" {
		return ""
	}
	return filepath.Join(dir, name)
}

// livesIn gives the host its cgroups: base below the lab's, and below that the
// one of its clients.
func (h *Host) livesIn(base, clients string) error {
	h.base, h.clients = base, clients
	_, err := h.lab.mkdirCgroup(filepath.Join(base, clients))
	return err
}

// becomesPod gives a host of the node the cgroups of a pod with one container,
// as containerd and systemd name them.
func (h *Host) becomesPod() error {
	sum := sha256.Sum256([]byte(h.lab.Name + "/" + h.Label))
	id := hex.EncodeToString(sum[:])
	h.ContainerID = id
	h.PodUID = strings.Join([]string{id[:8], id[8:12], "4" + id[13:16], "8" + id[17:20], id[20:32]}, "-")
	slice := "node/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + strings.ReplaceAll(h.PodUID, "-", "_") + ".slice"
	return h.livesIn(slice, "cri-containerd-"+id+".scope")
}

// mkdirCgroup makes a cgroup below the lab's and returns its directory. The
// lab's own is gone if the lab is being closed, and must not come back.
func (l *Lab) mkdirCgroup(name string) (string, error) {
	if l.cgroup == "" {
		return "", nil
	}
	dir := l.cgroup
	for part := range strings.SplitSeq(name, "/") {
		dir = filepath.Join(dir, part)
		if err := os.Mkdir(dir, 0o755); err != nil && !errors.Is(err, os.ErrExist) {
			return "", fmt.Errorf("netns: making cgroup %s: %w", name, err)
		}
	}
	return dir, nil
}

// removeCgroup kills what runs in dir and below, and removes it.
func removeCgroup(dir string) error {
	if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err := os.WriteFile(filepath.Join(dir, "cgroup.kill"), []byte("1"), 0); err != nil {
		return fmt.Errorf("netns: killing what is in %s: %w", dir, err)
	}
	err := Poll(5*time.Second, func() error { return rmdirs(dir) })
	if err != nil {
		return fmt.Errorf("netns: removing %s: %w", dir, err)
	}
	return nil
}

// rmdirs removes a tree of cgroups: their files cannot be unlinked, so this is
// rmdir from the leaves up.
func rmdirs(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.IsDir() {
			if err := rmdirs(filepath.Join(dir, e.Name())); err != nil {
				return err
			}
		}
	}
	return unix.Rmdir(dir)
}
