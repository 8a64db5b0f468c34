package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
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

// try is the last question of a preflight.
func try(ctx context.Context, cgroup string) (notes []string, err error) {
	if err := sweepScratch(cgroup); err != nil {
		notes = append(notes, err.Error())
	}
	s, err := newScratch(cgroup)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, s.remove()) }()
	l, err := net.ListenTCP("tcp4", &net.TCPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		return nil, fmt.Errorf("listening on loopback: %w", err)
	}
	defer l.Close()
	netns, err := hostNamespace(cgroup)
	if err != nil {
		return nil, err
	}
	in, err := newInstalled(Root{Path: s.path}, "", netns)
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, in.close()) }()
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1)
	state := rules.State{
		Clients: rules.Clients{Host: true, Pods: true}, Mark: intercept.Mark, MarkMask: intercept.Mark,
		Diverts: []rules.Divert{{
			Entries: []rules.Entry{{Prefix: netip.PrefixFrom(to.Addr(), 32), Port: to.Port()}},
			Ports:   rules.Ports{Host4: uint16(l.Addr().(*net.TCPAddr).Port)},
		}},
	}
	if err := errors.Join(in.set(state), in.beat()); err != nil {
		return nil, err
	}
	for _, h := range hooks {
		a, err := link.AttachCgroup(link.CgroupOptions{Path: s.path, Attach: h.attach, Program: h.program(in)})
		if err != nil {
			return nil, fmt.Errorf("attaching %s: %w", h.name, err)
		}
		defer a.Close()
	}
	if err := l.SetDeadline(time.Now().Add(probeTimeout)); err != nil {
		return nil, err
	}
	switch err := connectFrom(ctx, s.dir, to); {
	case errors.Is(err, unix.ECONNREFUSED):
		return nil, fmt.Errorf("programs can be attached, but a connect was not diverted: %w", err)
	case err != nil:
		return nil, err
	}
	c, err := l.Accept()
	if err != nil {
		return nil, fmt.Errorf("programs can be attached, but the connect of a probe did not arrive: %w", err)
	}
	return notes, c.Close()
}
