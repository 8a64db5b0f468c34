package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"runtime"
	"time"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// probeTimeout bounds the wait for the one connection of a probe.
const probeTimeout = 2 * time.Second

// Preflight implements intercept.Mode: it attaches the programs to a cgroup of its
// own for a moment, and sees a connect there arrive.
func (m *Mode) Preflight(ctx context.Context) intercept.Report {
	return preflight{
		setting: m.cfg.Cgroup, pinDir: m.cfg.PinDir, sys: here(), capable: capable, try: try,
		netNS:   func() (bool, error) { return sameNamespace("net") },
		release: release(), controllers: controllers,
	}.run(ctx)
}

// try is the last question of a preflight: the programs are loaded and, where a
// cgroup can be made for that, attached to it and seen to divert a connect there.
func try(ctx context.Context, cgroup string) (notes []string, err error) {
	runtime.LockOSThread() // its network namespace is asked for, and its end ends the child
	defer runtime.UnlockOSThread()
	netns, err := hostNamespace(cgroup)
	if err != nil {
		return nil, err
	}
	if err := sweepScratch(cgroup); err != nil {
		notes = append(notes, err.Error())
	}
	s, scratchErr := newScratch(cgroup)
	if scratchErr == nil {
		defer func() { err = errors.Join(err, s.remove()) }()
	}
	in, err := newInstalled(Root{Path: s.path}, "", netns)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	if scratchErr == nil {
		scratchErr = in.tryIn(ctx, s)
	}
	var none *noChild
	switch {
	case errors.Is(scratchErr, fs.ErrPermission) && !errors.Is(scratchErr, errAttach), errors.Is(scratchErr, unix.EROFS), errors.As(scratchErr, &none):
		// As where the node's tree is mounted read-only. The self-test at the
		// start decides.
		return append(notes, fmt.Sprintf("the programs can be loaded; whether they divert was not tried: %v", scratchErr)), nil
	}
	return notes, scratchErr
}

// errAttach marks the error of attaching a program.
var errAttach = errors.New("attaching")

// tryIn attaches the programs to s for a moment, and has a process there connect.
func (in *installed) tryIn(ctx context.Context, s scratch) error {
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return fmt.Errorf("listening on loopback: %w", err)
	}
	defer l.Close()
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1) // nobody listens there
	state := rules.State{
		Clients: rules.Clients{Host: true, Pods: true}, Mark: intercept.Mark, MarkMask: intercept.Mark,
		Diverts: []rules.Divert{{
			Entries: []rules.Entry{{Prefix: netip.PrefixFrom(to.Addr(), 32), Port: to.Port()}},
			Ports:   rules.Ports{Host4: uint16(l.Addr().(*net.TCPAddr).Port)},
		}},
	}
	if err := errors.Join(in.set(state), in.beat()); err != nil {
		return err
	}
	for _, h := range hooks {
		a, err := link.AttachCgroup(link.CgroupOptions{Path: s.path, Attach: h.attach, Program: h.program(in)})
		if errors.Is(err, unix.EPERM) {
			// The privileges have been looked at: this is how the kernel says that
			// a program above was attached without BPF_F_ALLOW_MULTI.
			return unmetf("have it attached with BPF_F_ALLOW_MULTI, or as a link; `bpftool cgroup tree` shows it",
				"somebody else's program at %s lets no other be attached below its cgroup", h.name)
		}
		if err != nil {
			return fmt.Errorf("%w %s: %w", errAttach, h.name, err)
		}
		defer a.Close()
	}
	if err := connectFrom(ctx, s.dir, to); err != nil {
		if errors.Is(err, unix.ECONNREFUSED) {
			return fmt.Errorf("programs can be attached, but a connect was not diverted: %w", err)
		}
		return err
	}
	if err := l.SetDeadline(time.Now().Add(probeTimeout)); err != nil {
		return err
	}
	c, err := l.Accept()
	if err != nil {
		return fmt.Errorf("programs can be attached, but the connect of a probe did not arrive: %w", err)
	}
	return c.Close()
}
