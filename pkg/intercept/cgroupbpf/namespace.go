package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// hostNamespace is the cookie of the calling thread's network namespace: the
// socket's, or before Linux 5.14 what the hook says of a connect of ours.
func hostNamespace(cgroup string) (uint64, error) {
	cookie, err := namespaceOfSocket()
	if errors.Is(err, unix.ENOPROTOOPT) {
		return namespaceOfConnect(cgroup)
	}
	return cookie, err
}

// namespaceOfSocket is a variable so that tests can play a kernel without it.
var namespaceOfSocket = func() (uint64, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, fmt.Errorf("making a socket: %w", err)
	}
	defer func() { _ = unix.Close(fd) }()
	cookie, err := unix.GetsockoptUint64(fd, unix.SOL_SOCKET, unix.SO_NETNS_COOKIE)
	if err != nil {
		return 0, fmt.Errorf("asking for the network namespace of a socket: %w", err)
	}
	return cookie, nil
}

// namespaceOfConnect attaches programs that divert nothing for as long as one
// connect of ours takes, which is refused on loopback.
func namespaceOfConnect(cgroup string) (_ uint64, err error) {
	probe, err := newInstalled(Root{Path: cgroup}, "", 0)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, probe.close()) }()
	to := netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), 1)
	s := rules.State{
		Mark: intercept.Mark, MarkMask: intercept.Mark,
		Diverts: []rules.Divert{{Entries: []rules.Entry{{Prefix: netip.PrefixFrom(to.Addr(), 32), Port: to.Port()}}}},
	}
	config := probe.config(s)
	config.Learn = 1
	if err := errors.Join(probe.set(s), probe.objects.KwConfig.Put(uint32(0), config)); err != nil {
		return 0, err
	}
	l, err := link.AttachCgroup(link.CgroupOptions{Path: cgroup, Attach: ebpf.AttachCGroupInet4Connect, Program: probe.objects.KwConnect4})
	if err != nil {
		return 0, fmt.Errorf("attaching to %s: %w", cgroup, err)
	}
	defer func() { err = errors.Join(err, l.Close()) }()
	own := intercept.NewOwnSockets(intercept.Mark, intercept.Mark)
	defer own.Watch(probe.exempt)()
	ctx, cancel := context.WithTimeout(context.Background(), probeTimeout)
	defer cancel()
	if c, err := own.DialContext(ctx, "tcp", to.String()); err == nil {
		_ = c.Close() // somebody listens there; the hook has seen it all the same
	} else if !errors.Is(err, syscall.ECONNREFUSED) {
		return 0, fmt.Errorf("connecting to learn the network namespace: %w", err)
	}
	var cookie uint64
	if err := probe.objects.KwLearnt.Lookup(uint32(0), &cookie); err != nil {
		return 0, err
	}
	if cookie == 0 {
		return 0, fmt.Errorf("the hook of %s did not see a connect of this process: is it below that cgroup?", cgroup)
	}
	return cookie, nil
}
