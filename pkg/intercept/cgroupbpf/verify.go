package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"

	"github.com/kasway/kasway/pkg/intercept"
)

const (
	suspectPins   = "rm below " + BPFFSPoint + "; a remount of the bpffs"
	suspectDetach = "`bpftool link detach`; a security agent that removes programs that it does not know"
	suspectAgent  = "an agent that ended while it took over"
	suspectCgroup = "a container runtime or systemd that removed the cgroup"
)

// programPrefix begins the names of our programs.
const programPrefix = "kw_"

// Verify implements intercept.Mode. That another agent of ours has taken over is
// no damage.
func (m *Mode) Verify(ctx context.Context) (damage []intercept.Damage, err error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stop != nil && m.installed == nil {
		return []intercept.Damage{{What: "nothing is attached: the cgroup " + m.cfg.Cgroup + " has gone, and was not found again", Suspects: suspectCgroup}}, nil
	}
	if m.installed == nil {
		return nil, nil
	}
	if !m.installed.root.there() {
		return []intercept.Damage{{What: "cgroup " + m.installed.root.Path + " is gone, and with it every hook", Suspects: suspectCgroup}}, nil
	}
	var errs []error
	for _, h := range hooks {
		d, err := m.installed.verify(h)
		errs = append(errs, err)
		if d.What != "" {
			damage = append(damage, d)
		}
	}
	return append(damage, m.installed.verifyBeat()...), errors.Join(errs...)
}

// verifyBeat looks for the pin by which agents know of each other.
func (in *installed) verifyBeat() []intercept.Damage {
	path := filepath.Join(in.dir, beatPin)
	if _, err := os.Stat(path); errors.Is(err, fs.ErrNotExist) {
		return []intercept.Damage{{What: "pin " + path + " is missing", Suspects: suspectPins}}
	}
	return nil
}

// verify returns the zero Damage if h runs what it should.
func (in *installed) verify(h hook) (d intercept.Damage, err error) {
	path := filepath.Join(in.dir, h.name)
	l, err := link.LoadPinnedLink(path, nil)
	if errors.Is(err, fs.ErrNotExist) {
		return intercept.Damage{What: "pin " + path + " is missing", Suspects: suspectPins}, nil
	}
	if err != nil {
		return d, fmt.Errorf("looking at %s: %w", path, err)
	}
	defer l.Close()
	info, err := l.Info()
	if err != nil {
		return d, fmt.Errorf("looking at the link of %s: %w", h.name, err)
	}
	switch own := in.links[h.name]; {
	case detached(info):
		return intercept.Damage{What: "program of " + h.name + " is attached no longer", Suspects: suspectDetach}, nil
	case own == nil || info.Program == own.program:
		return d, nil
	case info.Program < own.program && ours(info.Program): // the kernel gives ids in order
	case !ours(info.Program), in.alone():
		return intercept.Damage{What: "the program of " + h.name + " has been replaced by another one", Suspects: suspectDetach}, nil
	case in.relieved():
		return d, nil
	}
	return intercept.Damage{What: "the program of " + h.name + " is one of another agent, which is dead or older", Suspects: suspectAgent}, nil
}

// ours reports that a program is one of Kasway's, of whichever agent. Without
// CAP_SYS_ADMIN nobody is told: then it may be.
func ours(id ebpf.ProgramID) bool {
	p, err := ebpf.NewProgramFromID(id)
	if err != nil {
		return errors.Is(err, fs.ErrPermission)
	}
	defer p.Close()
	info, err := p.Info()
	return err == nil && strings.HasPrefix(info.Name, programPrefix)
}

// alone reports that no other agent has pinned its heartbeat since this one did.
func (in *installed) alone() bool {
	m, err := ebpf.LoadPinnedMap(filepath.Join(in.dir, beatPin), nil)
	if err != nil {
		return false
	}
	defer m.Close()
	a, err := m.Info()
	b, err2 := in.objects.KwBeat.Info()
	if err != nil || err2 != nil {
		return false
	}
	pinned, ok := a.ID()
	own, ok2 := b.ID()
	return ok && ok2 && pinned == own
}

// relieved reports that the agent lives whose programs the hooks run.
func (in *installed) relieved() bool {
	m, err := ebpf.LoadPinnedMap(filepath.Join(in.dir, beatPin), nil)
	if err != nil {
		return false
	}
	defer m.Close()
	var beat uint64
	if err := m.Lookup(uint32(0), &beat); err != nil {
		return false
	}
	now, err := monotonic()
	return err == nil && now < beat+uint64(intercept.HeartbeatTimeout)
}
