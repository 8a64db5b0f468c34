package intercept

import (
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
)

// raw6 connects an IPv6 socket to to, which may be v4-mapped, as clients of the
// old kind do for IPv4 too.
func raw6(to netip.AddrPort) (io.Closer, error) {
	fd, err := unix.Socket(unix.AF_INET6, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	f := os.NewFile(uintptr(fd), "client")
	if err := unix.Connect(fd, &unix.SockaddrInet6{Addr: to.Addr().As16(), Port: int(to.Port())}); err != nil {
		f.Close()
		return nil, fmt.Errorf("connect %s: %w", to, err)
	}
	return f, nil
}

// redirected is a node whose connections to the KAS end at one listener for
// both families.
func redirected(t *testing.T) (*netns.Host, *net.TCPListener) {
	t.Helper()
	topo := netns.New(t, netns.Spec{})
	l, err := topo.Node.Listen("tcp", "[::]:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	port := l.Addr().(*net.TCPAddr).Port
	for _, cmd := range []string{
		fmt.Sprintf("iptables -t nat -A OUTPUT -p tcp -d %s --dport 6443 -j REDIRECT --to-ports %d", netns.KAS4, port),
		fmt.Sprintf("ip6tables -t nat -A OUTPUT -p tcp -d %s --dport 6443 -j REDIRECT --to-ports %d", netns.KAS6, port),
	} {
		f := strings.Fields(cmd)
		if _, err := topo.Node.Run(f[0], f[1:]...); err != nil {
			t.Fatal(err)
		}
	}
	return topo.Node, l.(*net.TCPListener)
}

func TestCase_B48_OriginalDestinationOfEveryFamily(t *testing.T) {
	backToBase(t)
	node, l := redirected(t)
	var sockets *Sockets
	err := node.Do(func() (err error) {
		sockets, err = NewSockets()
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	defer shut(sockets)
	kas4, kas6 := netip.AddrPortFrom(netns.KAS4, 6443), netip.AddrPortFrom(netns.KAS6, 6443)
	mapped := netip.AddrPortFrom(netip.AddrFrom16(kas4.Addr().As16()), 6443)
	for _, c := range []struct {
		name string
		dial func() (io.Closer, error)
		want netip.AddrPort
	}{
		{"v4 socket", func() (io.Closer, error) { return net.Dial("tcp", kas4.String()) }, kas4},
		{"v6 socket", func() (io.Closer, error) { return raw6(kas6) }, kas6},
		{"v6 socket, v4-mapped", func() (io.Closer, error) { return raw6(mapped) }, kas4},
	} {
		t.Run(c.name, func(t *testing.T) {
			var client io.Closer
			err := node.Do(func() (err error) {
				client, err = c.dial()
				return err
			})
			if err != nil {
				t.Fatal(err)
			}
			defer client.Close()
			taken, err := l.AcceptTCP()
			if err != nil {
				t.Fatal(err)
			}
			defer shut(taken)
			got, err := Original(taken)
			if got != c.want || err != nil {
				t.Errorf("original %s, %v, want %s", got, err, c.want)
			}
			if o, known := sockets.Owner(unmapped(taken.RemoteAddr()), got); !known || o.UID != 0 {
				t.Errorf("owner %+v, %v, want root", o, known)
			}
		})
	}
}

func TestOriginalWithoutTrackingAndErrors(t *testing.T) {
	topo := netns.New(t, netns.Spec{})
	l, err := topo.Node.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	client, err := topo.Node.Dial(t.Context(), "tcp4", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer client.Close()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	taken := c.(*net.TCPConn)
	if got, err := Original(taken); got.IsValid() || err != nil {
		t.Errorf("untracked: %s, %v, want neither", got, err)
	}
	for errno, masked := range map[unix.Errno]bool{unix.ENOENT: true, unix.ENOPROTOOPT: true, unix.EPERM: false, unix.ENOMEM: false} {
		if got, err := tracked(netip.AddrPort{}, errno); got.IsValid() || (err == nil) != masked {
			t.Errorf("%v: %s, %v", errno, got, err)
		}
	}
	shut(taken)
	if got, err := Original(taken); err == nil {
		t.Errorf("closed: %s without an error", got)
	}
}
