package cgroupbpf

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"
)

// DefaultPinDir is the directory of the pins of all agents of a node: each has one
// of its own below, named after the id of the cgroup.
const DefaultPinDir = BPFFSPoint + "/kasway"

func pinsOf(dir string, root Root) string {
	return filepath.Join(dir, strconv.FormatUint(root.ID, 10))
}

// hook is one of the places that a program is attached to.
type hook struct {
	name   string // of the pin
	attach ebpf.AttachType
	// program is the one of an installation for this hook.
	program func(in *installed) *ebpf.Program
}

// hooks in the order of attaching: what diverts comes last, and goes first.
var hooks = []hook{
	{"sockops", ebpf.AttachCGroupSockOps, func(in *installed) *ebpf.Program { return in.objects.KwSockops }},
	{"getpeername4", ebpf.AttachCgroupInet4GetPeername, func(in *installed) *ebpf.Program { return in.objects.KwGetpeername4 }},
	{"getpeername6", ebpf.AttachCgroupInet6GetPeername, func(in *installed) *ebpf.Program { return in.objects.KwGetpeername6 }},
	{"connect4", ebpf.AttachCGroupInet4Connect, func(in *installed) *ebpf.Program { return in.objects.KwConnect4 }},
	{"connect6", ebpf.AttachCGroupInet6Connect, func(in *installed) *ebpf.Program { return in.objects.KwConnect6 }},
}

// hooked is a link by which a program of ours is attached.
type hooked struct {
	link    link.Link // kept reachable: a finalizer would detach an unpinned one
	program ebpf.ProgramID
}

// locked runs f while no other process of ours changes pins below dir, which is
// made if create says so.
func locked(dir string, create bool, f func() error) error {
	for {
		if create {
			if err := os.MkdirAll(dir, 0o700); err != nil {
				return fmt.Errorf("making the directory of pins: %w", err)
			}
		}
		d, err := os.Open(dir)
		if create && errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return fmt.Errorf("opening the directory of pins: %w", err)
		}
		if err := unix.Flock(int(d.Fd()), unix.LOCK_EX); err != nil {
			return errors.Join(fmt.Errorf("locking the directory of pins: %w", err), d.Close())
		}
		if still(d, dir) {
			return errors.Join(f(), d.Close()) // which unlocks
		}
		// Who had the lock before has removed it.
		if err := d.Close(); err != nil {
			return err
		}
	}
}

// still reports that d is what is found at path.
func still(d *os.File, path string) bool {
	a, err := d.Stat()
	b, err2 := os.Stat(path)
	return err == nil && err2 == nil && os.SameFile(a, b)
}

// hook makes every hook run the programs of in: links that an earlier agent has
// pinned are taken over without a moment in which the hook runs nothing.
func (in *installed) hook() error {
	return locked(filepath.Dir(in.dir), true, func() error {
		if err := sweep(filepath.Dir(in.dir)); err != nil {
			return fmt.Errorf("removing pins of cgroups that are gone: %w", err)
		}
		if err := os.MkdirAll(in.dir, 0o700); err != nil {
			return fmt.Errorf("making the directory of pins: %w", err)
		}
		// First: an agent whose programs are being replaced sees by whom.
		if err := errors.Join(in.beat(), in.pinBeat()); err != nil {
			return fmt.Errorf("pinning the heartbeat: %w", err)
		}
		for _, h := range hooks {
			if err := in.hookOne(h); err != nil {
				return fmt.Errorf("attaching %s to %s: %w", h.name, in.root.Path, err)
			}
		}
		return nil
	})
}

func (in *installed) hookOne(h hook) error {
	path, program := filepath.Join(in.dir, h.name), h.program(in)
	info, err := program.Info()
	if err != nil {
		return err
	}
	id, _ := info.ID() // there is one from Linux 4.13 on
	l, err := in.adopt(h.name, path, program)
	if err != nil {
		return err
	}
	if l == nil {
		if l, err = link.AttachCgroup(link.CgroupOptions{Path: in.root.Path, Attach: h.attach, Program: program}); err != nil {
			return err
		}
		if err := l.Pin(path); err != nil {
			return errors.Join(err, l.Close())
		}
		in.fresh = true
		in.made = append(in.made, path)
	}
	if old := in.links[h.name]; old != nil && old.link != l {
		_ = old.link.Close() // another descriptor of l, or a dead link
	}
	in.links[h.name] = &hooked{l, id}
	return nil
}

// adopt makes the pinned link run program, or the one of ours whose pin somebody
// has removed. It returns nil if there is none that lives, and nothing in the way
// of a new one.
func (in *installed) adopt(name, path string, program *ebpf.Program) (link.Link, error) {
	l, err := link.LoadPinnedLink(path, nil)
	if err == nil {
		if err = l.Update(program); err == nil {
			return l, nil
		}
		_ = l.Close() // its cgroup has gone, or somebody has detached it
	}
	if rerr := os.Remove(path); rerr != nil && !errors.Is(rerr, fs.ErrNotExist) {
		return nil, errors.Join(err, rerr)
	}
	old := in.links[name]
	if old == nil || old.link.Update(program) != nil {
		return nil, nil
	}
	_ = old.link.Unpin() // it still thinks that it is pinned
	return old.link, old.link.Pin(path)
}

// beatPin is the heartbeat of the programs that the hooks run: by it an agent
// knows whether the one that has taken over from it lives.
const beatPin = "beat"

// pinBeat pins the heartbeat of in where that of another agent may be.
func (in *installed) pinBeat() error {
	path := filepath.Join(in.dir, beatPin)
	own, err := in.objects.KwBeat.Clone() // which knows of no pin
	if err != nil {
		return err
	}
	defer own.Close()
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return own.Pin(path)
}

// undo removes the links that this installation has made, after a failure:
// nobody would beat for them. What it has taken over is taken back by the agent
// that it is from, which sees that nobody beats.
func (in *installed) undo() error {
	all := filepath.Dir(in.dir)
	err := locked(all, false, func() error {
		var errs []error
		for _, path := range in.made {
			errs = append(errs, removePin(path))
		}
		if in.alone() {
			errs = append(errs, os.Remove(filepath.Join(in.dir, beatPin)))
		}
		return errors.Join(append(errs, removeEmpty(in.dir), removeEmpty(all))...)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // nothing had been pinned yet
	}
	return err
}

// unhook ends what in does: connects are refused from now on, or the programs are
// detached, unless another agent has taken over.
func (in *installed) unhook() error {
	if in.refuse {
		return in.silence() // in another agent's programs it means nothing
	}
	all := filepath.Dir(in.dir)
	err := locked(all, false, func() error {
		var errs []error
		for _, h := range slices.Backward(hooks) {
			path := filepath.Join(in.dir, h.name)
			if l := in.links[h.name]; l != nil && runs(path) == l.program {
				errs = append(errs, removePin(path))
			}
		}
		// Only if nobody else has pinned anything.
		if nobodys(in.dir) {
			errs = append(errs, removeGroup(in.dir))
		}
		return errors.Join(append(errs, removeEmpty(all))...)
	})
	if errors.Is(err, fs.ErrNotExist) {
		return nil // somebody has removed it all
	}
	return err
}

// removeEmpty removes a directory unless it is gone, or holds pins of others.
func removeEmpty(dir string) error {
	err := os.Remove(dir)
	if errors.Is(err, unix.ENOTEMPTY) || errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// runs is the program of a pinned link; 0 if that cannot be told.
func runs(path string) ebpf.ProgramID {
	l, err := link.LoadPinnedLink(path, nil)
	if err != nil {
		return 0
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return 0
	}
	return info.Program
}

// sweep removes the pins of cgroups that are gone, which run nothing any more.
func sweep(dir string) error {
	groups, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var errs []error
	for _, g := range groups {
		if group := filepath.Join(dir, g.Name()); g.IsDir() && nobodys(group) {
			errs = append(errs, removeGroup(group))
		}
	}
	return errors.Join(errs...)
}

// nobodys reports that no link that is pinned in group is attached to anything.
func nobodys(group string) bool {
	for _, h := range hooks {
		l, err := link.LoadPinnedLink(filepath.Join(group, h.name), nil)
		if errors.Is(err, fs.ErrNotExist) {
			continue
		}
		if err != nil {
			return false
		}
		info, err := l.Info()
		_ = l.Close()
		if err != nil || !detached(info) {
			return false
		}
	}
	return true
}

func detached(info *link.Info) bool {
	c := info.Cgroup()
	return c == nil || c.CgroupId == 0
}
