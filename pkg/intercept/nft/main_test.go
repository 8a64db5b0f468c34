package nft

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// childEnv makes the test binary an agent that applies the state in it, with
// listeners of its own where the state has no ports.
const childEnv = "KASWAY_NFT_TEST_STATE"

func TestMain(m *testing.M) {
	if s := os.Getenv(childEnv); s != "" {
		fmt.Println(child(s))
		return
	}
	if os.Getenv(preflightEnv) != "" {
		preflightChild()
		return
	}
	goleak.VerifyTestMain(m)
}

// child is an agent to be killed or frozen: it listens with the shortest
// backlog there is, applies and prints "ready".
func child(encoded string) error {
	var s rules.State
	if err := json.Unmarshal([]byte(encoded), &s); err != nil {
		return err
	}
	for i := range s.Diverts {
		host, err := shortListener(netip.MustParseAddr("127.0.0.1"))
		if err != nil {
			return err
		}
		pods, err := shortListener(s.Node4)
		if err != nil {
			return err
		}
		if s.Diverts[i].Ports == (rules.Ports{}) {
			s.Diverts[i].Ports = rules.Ports{Host4: host, Pod4: pods}
		}
	}
	if err := New(Config{}).Apply(context.Background(), s); err != nil {
		return err
	}
	fmt.Println("ready")
	time.Sleep(time.Minute) // it is killed before
	return nil
}

// shortListener accepts nothing; its backlog holds one connection.
func shortListener(at netip.Addr) (uint16, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return 0, err
	}
	if err := unix.Bind(fd, &unix.SockaddrInet4{Addr: at.As4()}); err != nil {
		return 0, err
	}
	if err := unix.Listen(fd, 0); err != nil {
		return 0, err
	}
	sa, err := unix.Getsockname(fd)
	if err != nil {
		return 0, err
	}
	return uint16(sa.(*unix.SockaddrInet4).Port), nil
}

// serve answers every connection on l with its name and echoes, until l is
// closed; then it ends them all: a test may have taken their nat away.
func serve(l net.Listener, name string) (wait func()) {
	var wg sync.WaitGroup
	wg.Go(func() {
		var open []net.Conn
		defer func() {
			for _, c := range open {
				c.Close()
			}
		}()
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			open = append(open, c)
			wg.Go(func() {
				defer c.Close()
				if _, err := c.Write([]byte(name + "\n")); err == nil {
					_, _ = io.Copy(c, c)
				}
			})
		}
	})
	return wg.Wait
}
