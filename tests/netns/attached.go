package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// hooks are the places of a cgroup at which Kasway might attach something.
var hooks = []struct {
	name string
	at   ebpf.AttachType
}{
	{"connect4", ebpf.AttachCGroupInet4Connect},
	{"connect6", ebpf.AttachCGroupInet6Connect},
	{"getpeername4", ebpf.AttachCgroupInet4GetPeername},
	{"getpeername6", ebpf.AttachCgroupInet6GetPeername},
	{"getsockname4", ebpf.AttachCgroupInet4GetSockname},
	{"getsockname6", ebpf.AttachCgroupInet6GetSockname},
	{"sendmsg4", ebpf.AttachCGroupUDP4Sendmsg},
	{"sendmsg6", ebpf.AttachCGroupUDP6Sendmsg},
	{"sock_create", ebpf.AttachCGroupInetSockCreate},
	{"sock_release", ebpf.AttachCgroupInetSockRelease},
	{"sockops", ebpf.AttachCGroupSockOps},
}

// Attached is a program that is attached to a cgroup.
type Attached struct {
	// Hook is its place: "connect4", "sockops", ...
	Hook string
	// Program is its id. Link is that of the link that holds it, 0 if none does.
	Program, Link uint32
}

// AttachedTo lists what is attached to the very cgroup dir, in the order of the
// hooks and, at each, of attachment.
func AttachedTo(dir string) ([]Attached, error) {
	f, err := os.Open(dir)
	if err != nil {
		return nil, fmt.Errorf("netns: programs of a cgroup: %w", err)
	}
	defer f.Close()
	links, err := linksOn(f)
	if err != nil {
		return nil, err
	}
	var all []Attached
	for _, h := range hooks {
		found, err := link.QueryPrograms(link.QueryOptions{Target: int(f.Fd()), Attach: h.at})
		if errors.Is(err, ebpf.ErrNotSupported) {
			continue // an older kernel, which has no such hook
		}
		if err != nil {
			return nil, fmt.Errorf("netns: programs at %s of %s: %w", h.name, dir, err)
		}
		for _, p := range found.Programs {
			all = append(all, Attached{h.name, uint32(p.ID), links[hook{p.ID, h.at}]})
		}
	}
	return all, nil
}

// hook is a program at one place.
type hook struct {
	program ebpf.ProgramID
	at      ebpf.AttachType
}

// linksOn are the ids of the links that attach something to the cgroup dir.
// (Asking the cgroup itself tells programs, but no links.)
func linksOn(dir *os.File) (map[hook]uint32, error) {
	var stat unix.Stat_t
	if err := unix.Fstat(int(dir.Fd()), &stat); err != nil {
		return nil, err
	}
	links := map[hook]uint32{}
	it := new(link.Iterator)
	defer it.Close()
	for it.Next() {
		info, err := it.Link.Info()
		if err != nil {
			continue // it has ended meanwhile
		}
		if c := info.Cgroup(); c != nil && c.CgroupId == stat.Ino {
			links[hook{info.Program, ebpf.AttachType(c.AttachType)}] = uint32(info.ID)
		}
	}
	return links, it.Err()
}

// attachedBelow lists what is attached to dir and to every cgroup below it.
func attachedBelow(dir string) (lines []string, err error) {
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.IsDir() {
			return ignoreMissing(err)
		}
		all, err := AttachedTo(path)
		if err != nil {
			return ignoreMissing(err)
		}
		for _, a := range all {
			lines = append(lines, fmt.Sprintf("%s of %s: program %d, link %d", a.Hook, path, a.Program, a.Link))
		}
		return nil
	})
	return lines, err
}

// Around is what a mode might leave around the node in places that are this
// topology's own: programs on its cgroups, cgroups, pins, and files in trees.
func (t *Topology) Around(trees ...string) (Around, error) {
	pins, err := t.BPFFS()
	if err != nil {
		return Around{}, err
	}
	a := Around{Trees: append([]string{pins}, trees...)}
	if dir := t.NodeCgroup(); dir != "" {
		a.Cgroups, a.Trees = []string{dir}, append(a.Trees, dir)
	}
	return a, nil
}
