package intercept

import (
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

func TestSockets(t *testing.T) {
	const user = 4242
	backToBase(t)
	u, err := NewSockets()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { shut(u) })
	for _, at := range loopback() {
		l, err := net.ListenTCP("tcp", net.TCPAddrFromAddrPort(netip.AddrPortFrom(at, 0)))
		if err != nil {
			t.Fatal(err)
		}
		defer shut(l)
		dst := unmapped(l.Addr())
		c := dialTo(t, dst)
		raw, err := c.SyscallConn()
		if err != nil {
			t.Fatal(err)
		}
		// A socket's owner is whoever made it, or was given it.
		if cerr := raw.Control(func(fd uintptr) { err = unix.Fchown(int(fd), user, -1) }); cerr != nil || err != nil {
			t.Fatal(cerr, err)
		}
		src := unmapped(c.LocalAddr())
		if o, known := u.Owner(src, dst); o.UID != user || o.CgroupID != ownCgroup(t) || !known {
			t.Errorf("%s: %+v, %v, want uid %d and cgroup %d", dst, o, known, user, ownCgroup(t))
		}
		nobody := netip.AddrPortFrom(at, 1)
		for _, other := range []netip.AddrPort{nobody, {}} {
			if o, known := u.Owner(other, dst); known {
				t.Errorf("%s from %s: %+v", dst, other, o)
			}
		}
		// Here the kernel finds a socket: the listener.
		if o, known := u.Owner(dst, nobody); known {
			t.Errorf("the listener is taken for a client: %+v", o)
		}
		shut(c)
		if o, known := u.Owner(src, dst); known {
			t.Errorf("%s after close: %+v", dst, o)
		}
	}
}

// ownCgroup is the id of this process's cgroup of version 2.
func ownCgroup(t *testing.T) uint64 {
	t.Helper()
	table, err := os.ReadFile("/proc/self/cgroup")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(table)) {
		path, ok := strings.CutPrefix(strings.TrimSpace(line), "0::")
		for _, root := range []string{"/sys/fs/cgroup/unified", "/sys/fs/cgroup"} {
			if info, err := os.Stat(root + path); ok && err == nil {
				if _, err := os.Stat(root + "/cgroup.procs"); err == nil {
					return info.Sys().(*syscall.Stat_t).Ino
				}
			}
		}
	}
	t.Skip("no cgroup 2 in sight")
	return 0
}
