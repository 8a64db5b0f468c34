package workload

import (
	"strings"
	"testing"
	"unicode/utf8"
)

const (
	id   = "4f1e5a0c9d2b4f1e5a0c9d2b4f1e5a0c9d2b4f1e5a0c9d2b4f1e5a0c9d2b4f1e"
	uid  = "0c7b9a52-6f3e-4d55-9a53-3a3e1b6a8c11"
	uid_ = "0c7b9a52_6f3e_4d55_9a53_3a3e1b6a8c11"
	hash = "d41d8cd98f00b204e9800998ecf8427e" // a static pod's
)

func TestParse(t *testing.T) {
	const short = "4f1e5a0c9d2b"
	scope := "cri-containerd-" + id + ".scope"
	for _, c := range []struct {
		path string
		want Workload
		text string
	}{
		{"/", Workload{Kind: Cgroup}, "cgroup /"},
		{"/init.scope", Workload{Kind: Unit, Unit: "init.scope"}, "init.scope"},
		{"/system.slice/kubelet.service", Workload{Kind: Unit, Unit: "kubelet.service"}, "kubelet.service"},
		{"/system.slice/system-getty.slice/getty@tty1.service", Workload{Kind: Unit, Unit: "getty@tty1.service"}, "getty@tty1.service"},
		{"/system.slice/kubelet.service/worker", Workload{Kind: Unit, Unit: "kubelet.service"}, "kubelet.service"},
		{"/system.slice/_memory.service", Workload{Kind: Unit, Unit: "memory.service"}, "memory.service"},
		{"/system.slice", Workload{Kind: Cgroup}, "cgroup /system.slice"},
		{"/user.slice/user-1000.slice/session-3.scope", Workload{Kind: Unit, Unit: "session-3.scope"}, "session-3.scope"},
		{"/kasway/agents", Workload{Kind: Cgroup}, "cgroup /kasway/agents"},
		// What a user calls his own, and what a process makes within its unit, is
		// not the system's.
		{"/user.slice/user-1000.slice/user@1000.service/app.slice/kubelet.service", Workload{Kind: Unit, Unit: "user@1000.service"}, "user@1000.service"},
		{"/lab/system.slice/kubelet.service", Workload{Kind: Cgroup}, "cgroup /lab/system.slice/kubelet.service"},
		{"/system.slice/x.service/kubepods/pod" + uid + "/" + id, Workload{Kind: Container, Unit: "x.service", ContainerID: id}, "container " + short},

		// Kubernetes, systemd driver.
		{"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod" + uid_ + ".slice/" + scope,
			Workload{Kind: Pod, Unit: scope, PodUID: uid, ContainerID: id}, "pod " + uid + "/" + short},
		{"/kubepods.slice/kubepods-pod" + uid_ + ".slice/crio-" + id + ".scope/container",
			Workload{Kind: Pod, Unit: "crio-" + id + ".scope", PodUID: uid, ContainerID: id}, "pod " + uid + "/" + short},
		{"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-besteffort.slice/kubelet-kubepods-besteffort-pod" + hash + ".slice/docker-" + id + ".scope",
			Workload{Kind: Pod, Unit: "docker-" + id + ".scope", PodUID: hash, ContainerID: id}, "pod " + hash + "/" + short},
		{"/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod" + uid_ + ".slice", Workload{Kind: Pod, PodUID: uid}, "pod " + uid},
		{"/kubepods.slice/kubepods-burstable.slice", Workload{Kind: Cgroup}, "cgroup /kubepods.slice/kubepods-burstable.slice"},
		// Kubernetes, cgroupfs driver.
		{"/kubepods/besteffort/pod" + uid + "/" + id, Workload{Kind: Pod, PodUID: uid, ContainerID: id}, "pod " + uid + "/" + short},
		{"/kubepods/pod" + hash + "/" + id, Workload{Kind: Pod, PodUID: hash, ContainerID: id}, "pod " + hash + "/" + short},
		{"/kubelet/kubepods/burstable/pod" + uid + "/" + id + "/init", Workload{Kind: Pod, PodUID: uid, ContainerID: id}, "pod " + uid + "/" + short},
		{"/podinfo/x", Workload{Kind: Cgroup}, "cgroup /podinfo/x"},

		// Containers of nobody's pod.
		{"/system.slice/docker-" + id + ".scope", Workload{Kind: Container, Unit: "docker-" + id + ".scope", ContainerID: id}, "container " + short},
		{"/docker/" + id, Workload{Kind: Container, ContainerID: id}, "container " + short},
		{"/docker/" + id + "/system.slice/kubelet.service", Workload{Kind: Container, ContainerID: id}, "container " + short},
		{"/docker/" + id + "/kubepods/pod" + uid + "/" + strings.Repeat("b", 64), Workload{Kind: Container, ContainerID: id}, "container " + short},
		{"/machine.slice/libpod-" + id + ".scope/container", Workload{Kind: Container, Unit: "libpod-" + id + ".scope", ContainerID: id}, "container " + short},
		{"/docker/" + id[:63], Workload{Kind: Cgroup}, "cgroup /docker/" + id[:63]},
	} {
		c.want.Path = c.path
		if got := Parse(c.path); got != c.want {
			t.Errorf("%s:\n got %+v\nwant %+v", c.path, got, c.want)
		}
		if got := Parse(c.path).String(); got != c.text {
			t.Errorf("%s is called %q, want %q", c.path, got, c.text)
		}
	}
	if s := (Workload{}).String(); s != "" {
		t.Errorf("nothing is called %q", s)
	}
}

func FuzzParse(f *testing.F) {
	for _, s := range []string{"", "/", "//", "/system.slice/é\n\x01.service", "/kubepods/pod" + uid + "/" + id,
		"/kubepods.slice/kubepods-pod" + uid_ + ".slice/cri-containerd-" + id + ".scope", "/_.slice/.service", "\xff"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, path string) {
		w := Parse(path)
		names := strings.Split(path, "/")
		// The guard trusts Unit: it is a name in the path, and nothing but slices
		// stands before it.
		for _, name := range names {
			if w.Unit == "" || strings.TrimPrefix(name, "_") == w.Unit {
				break
			}
			if name != "" && !strings.HasSuffix(name, ".slice") {
				t.Errorf("%q: unit %q after %q", path, w.Unit, name)
			}
		}
		if w.Path != path || w.Kind == "" || (w.Kind == Pod) != (w.PodUID != "") || w.Kind == Container && w.ContainerID == "" || w.Kind == Unit && w.Unit == "" {
			t.Errorf("%q: %+v", path, w)
		}
		if utf8.ValidString(path) && !utf8.ValidString(w.String()) {
			t.Errorf("%q: %q was cut within a character", path, w.String())
		}
	})
}
