package nft

import (
	"context"
	"net/netip"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// BenchmarkUnmatchedConnect is what a connect to somewhere else costs: refused
// by loopback, so that little but the rules differs.
func BenchmarkUnmatchedConnect(b *testing.B) {
	for name, installed := range map[string]bool{"without": false, "with": true} {
		b.Run(name, func(b *testing.B) {
			netns.Require(b)
			lab, err := netns.Open()
			if err != nil {
				b.Fatal(err)
			}
			defer func() { _ = lab.Close() }()
			node, err := lab.Host("node")
			if err != nil {
				b.Fatal(err)
			}
			// Conntrack and somebody's nat are at work in both.
			if err := node.InstallKubeProxy(netns.NFTables, netns.Service{ClusterIP: svc4, Endpoint: kas4}); err != nil {
				b.Fatal(err)
			}
			s := (&world{ports: rules.Ports{Host4: 1, Host6: 2, Pod4: 3, Pod6: 4}}).state(nil)
			m := New(Config{})
			defer func() { _ = m.Close() }()
			if err := node.Do(func() error {
				if installed {
					if err := m.Apply(context.Background(), s); err != nil {
						return err
					}
				}
				to := &unix.SockaddrInet4{Addr: netip.MustParseAddr("127.0.0.1").As4(), Port: 9}
				b.ResetTimer()
				for b.Loop() {
					fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM, 0)
					if err != nil {
						return err
					}
					_ = unix.Connect(fd, to)
					_ = unix.Close(fd)
				}
				return nil
			}); err != nil {
				b.Fatal(err)
			}
		})
	}
}
