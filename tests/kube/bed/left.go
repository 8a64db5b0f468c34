package bed

import (
	"bufio"
	"os"
	"path/filepath"
	"strings"
)

// Left lists what a bed has left on the machine: folders, namespaces, control
// groups, mounts, processes of its binaries, and programs in the kernel. After
// Down it is empty.
func Left(bin Binaries) []string {
	var left []string
	paths := []string{Dir()}
	for _, ns := range namespaces() {
		paths = append(paths, "/run/netns/"+ns)
	}
	groups, _ := hierarchies()
	for _, g := range groups {
		paths = append(paths, filepath.Join(g, prefix))
	}
	for _, p := range paths {
		if _, err := os.Lstat(p); err == nil {
			left = append(left, p)
		}
	}
	if mounts, err := os.Open("/proc/self/mountinfo"); err == nil {
		for lines := bufio.NewScanner(mounts); lines.Scan(); {
			if strings.Contains(lines.Text(), Dir()) {
				left = append(left, "mount "+lines.Text())
			}
		}
		mounts.Close()
	}
	exes, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, e := range exes {
		switch exe, _ := os.Readlink(e); exe {
		case bin.Hyperkube, bin.Agent, bin.Server, bin.Box:
			left = append(left, "process "+filepath.Dir(e)+" "+exe)
		}
	}
	return append(left, leftPrograms()...)
}
