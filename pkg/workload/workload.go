// Package workload is WHO runs in a cgroup: it finds the directory of a cgroup
// id and reads from its path which unit, container or pod that is.
package workload

import (
	"regexp"
	"strings"
)

// Kind says what a cgroup is known to be.
type Kind string

// The kinds of a Workload.
const (
	// Unit is one of systemd's: a service, or the scope of a login.
	Unit Kind = "unit"
	// Container is one that no pod is known of.
	Container Kind = "container"
	// Pod is one of Kubernetes, with ContainerID unless a process is in the
	// pod's own cgroup.
	Pod Kind = "pod"
	// Cgroup is anything else; only its Path is known.
	Cgroup Kind = "cgroup"
)

// Workload is what runs in one cgroup. Its texts may hold any bytes but NUL:
// whoever may make a cgroup chooses its name.
type Workload struct {
	Kind Kind
	// Unit is the system's unit that holds the cgroup, such as
	// "kubelet.service", also where that holds a container; empty where there
	// is none. Units within it, as of a user's own service manager, never count:
	// anybody can call one "kubelet.service".
	Unit string
	// PodUID is as in the Pod's metadata.uid; of a static pod, its 32 digits.
	PodUID string
	// ContainerID is the runtime's, without the runtime's name.
	ContainerID string
	// Path is that of the cgroup below the index's root, with a leading slash.
	Path string
}

// String names w for people, in one word or two: "kubelet.service", "pod
// 0c7b…/4f1e5a0c9d2b", "container 4f1e5a0c9d2b", or the path of a cgroup.
func (w Workload) String() string {
	id := w.ContainerID[:min(len(w.ContainerID), 12)] // as container tools show it
	switch w.Kind {
	case Unit:
		return w.Unit
	case Pod:
		if id != "" {
			id = "/" + id
		}
		return "pod " + w.PodUID + id
	case Container:
		return "container " + id
	case Cgroup:
		return "cgroup " + w.Path
	}
	return ""
}

var (
	// kubepods.slice's children, also below a --cgroup-root:
	// [kubelet-]kubepods[-burstable]-pod<uid>.slice, with _ for - in the uid.
	podSlice = regexp.MustCompile(`^(?:.+-)?kubepods(?:-burstable|-besteffort)?-pod([0-9A-Za-z_]+)\.slice$`)
	podDir   = regexp.MustCompile(`^pod([0-9A-Za-z-]+)$`)
	// <id>, <runtime>-<id>.scope
	container = regexp.MustCompile(`^(?:[a-z-]+-)?([0-9a-f]{64})(?:\.scope)?$`)
	// A unit that has processes; slices have only other units.
	unit = regexp.MustCompile(`^.+\.(?:service|scope|socket|mount|swap)$`)
)

// Parse reads the path of a cgroup of version 2, from the hierarchy's root or
// from that of a node within it.
func Parse(path string) Workload {
	w := Workload{Kind: Cgroup, Path: path}
	names := strings.FieldsFunc(path, func(r rune) bool { return r == '/' })
	w.Unit = systemUnit(names)
	pod := podOf(names)
	if pod >= 0 {
		w.Kind, w.PodUID = Pod, podUID(names[pod])
	}
	// A container within a container, such as of a node that is one itself, is
	// not told apart from the outer one.
	for _, name := range names[pod+1:] {
		if m := container.FindStringSubmatch(name); m != nil {
			w.ContainerID = m[1]
			if w.Kind == Cgroup {
				w.Kind = Container
			}
			break
		}
	}
	if w.Kind == Cgroup && w.Unit != "" {
		w.Kind = Unit
	}
	return w
}

// systemUnit is the first name that is no slice, if it is a unit.
func systemUnit(names []string) string {
	for _, name := range names {
		if strings.HasSuffix(name, ".slice") {
			continue
		}
		if !unit.MatchString(name) {
			return ""
		}
		// systemd puts _ before what the kernel could take for its own file.
		return strings.TrimPrefix(name, "_")
	}
	return ""
}

// podOf is the index of the directory of a pod; -1: none. In both of the
// kubelet's cgroup drivers it is one of the outermost directories; what a
// service or a container has made within its own proves nothing.
func podOf(names []string) int {
	kubepods := false
	for i, name := range names {
		switch {
		case podSlice.MatchString(name), kubepods && podDir.MatchString(name):
			return i
		case name == "kubepods":
			kubepods = true
		case unit.MatchString(name), container.MatchString(name):
			return -1
		}
	}
	return -1
}

func podUID(name string) string {
	if m := podSlice.FindStringSubmatch(name); m != nil {
		return strings.ReplaceAll(m[1], "_", "-")
	}
	return podDir.FindStringSubmatch(name)[1]
}
