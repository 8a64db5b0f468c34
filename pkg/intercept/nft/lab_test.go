package nft

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

const mark = 0x40

var (
	node4 = netip.MustParseAddr("169.254.77.1")
	node6 = netip.MustParseAddr("fd6b:7700::1")
	kas4  = netip.AddrPortFrom(netns.KAS4, 6443)
	kas6  = netip.AddrPortFrom(netns.KAS6, 6443)
	svc4  = netip.AddrPortFrom(netns.ClusterIP4, 443)
	svc6  = netip.AddrPortFrom(netns.ClusterIP6, 443)
)

// world is a node with pods, a control plane whose listener answers "kas", and
// the agent's listeners that answer "host4", "pods6" and so on.
type world struct {
	*netns.Topology
	t     *testing.T
	ports rules.Ports
}

func newWorld(t *testing.T, spec netns.Spec) *world {
	t.Helper()
	w := &world{Topology: netns.New(t, spec), t: t}
	for _, a := range []netip.Addr{node4, node6} {
		if err := w.Node.AddAddr("lo", netip.PrefixFrom(a, a.BitLen())); err != nil {
			t.Fatal(err)
		}
	}
	w.listen(w.ControlPlane, kas4, "kas")
	w.listen(w.ControlPlane, kas6, "kas")
	w.ports = rules.Ports{
		Host4: w.listen(w.Node, netip.MustParseAddrPort("127.0.0.1:0"), "host4"),
		Host6: w.listen(w.Node, netip.MustParseAddrPort("[::1]:0"), "host6"),
		Pod4:  w.listen(w.Node, netip.AddrPortFrom(node4, 0), "pods4"),
		Pod6:  w.listen(w.Node, netip.AddrPortFrom(node6, 0), "pods6"),
	}
	return w
}

func (w *world) listen(h *netns.Host, at netip.AddrPort, name string) uint16 {
	w.t.Helper()
	l, err := h.Listen("tcp", at.String())
	if err != nil {
		w.t.Fatal(err)
	}
	wait := serve(l, name)
	w.t.Cleanup(func() {
		l.Close()
		wait()
	})
	return l.Addr().(*net.TCPAddr).AddrPort().Port()
}

func (w *world) state(change func(*rules.State)) rules.State {
	s := rules.State{Generation: "t1", Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Refuse,
		Mark: mark, MarkMask: mark, Node4: node4, Node6: node6,
		Diverts: []rules.Divert{{Name: "kas", Entries: entries(kas4, kas6, svc4, svc6), Ports: w.ports}}}
	if change != nil {
		change(&s)
	}
	return s
}

func entries(addrs ...netip.AddrPort) (all []rules.Entry) {
	for _, a := range addrs {
		all = append(all, rules.Entry{Prefix: netip.PrefixFrom(a.Addr(), a.Addr().BitLen()), Port: a.Port()})
	}
	return all
}

// apply makes a Mode in the node's namespace; it is closed with the test.
func (w *world) apply(s rules.State) *Mode {
	w.t.Helper()
	m := New(Config{})
	w.reapply(m, s)
	w.t.Cleanup(func() {
		if err := m.Close(); err != nil {
			w.t.Error(err)
		}
	})
	return m
}

func (w *world) reapply(m *Mode, s rules.State) {
	w.t.Helper()
	if err := w.Node.Do(func() error { return m.Apply(context.Background(), s) }); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) cleanup() {
	w.t.Helper()
	if err := w.Node.Do(func() error { return Cleanup(context.Background()) }); err != nil {
		w.t.Fatal(err)
	}
}

// addLocal gives the node an address. The kernel makes the route to an IPv6
// address later, in a worker: until then nobody can connect there.
func (w *world) addLocal(a netip.AddrPort) {
	w.t.Helper()
	err := w.Node.AddAddr("lo", netip.PrefixFrom(a.Addr(), a.Addr().BitLen()))
	if err == nil {
		err = netns.Poll(bound, func() error {
			c, err := w.Node.DialWith(context.Background(), &net.Dialer{}, "tcp", netip.AddrPortFrom(a.Addr(), 1).String())
			if err == nil {
				return c.Close()
			}
			if errors.Is(err, syscall.ECONNREFUSED) {
				return nil
			}
			return err
		})
	}
	if err != nil {
		w.t.Fatal(err)
	}
}

// ask connects and says who answered: its name, "refused" or the error.
func ask(from *netns.Host, to netip.AddrPort) string {
	return askWith(from, &net.Dialer{Timeout: 5 * time.Second}, to)
}

func askWith(from *netns.Host, d *net.Dialer, to netip.AddrPort) string {
	c, err := from.DialWith(context.Background(), d, "tcp", to.String())
	if errors.Is(err, syscall.ECONNREFUSED) {
		return "refused"
	}
	if err != nil {
		return err.Error()
	}
	defer c.Close()
	return banner(c)
}

func banner(c net.Conn) string {
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err.Error()
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	if err != nil {
		return err.Error()
	}
	return strings.TrimSpace(line)
}

func (w *world) want(from *netns.Host, to netip.AddrPort, want string) {
	w.t.Helper()
	if got := ask(from, to); got != want {
		w.t.Errorf("%s to %s: answered by %q, want %q", from.Label, to, got, want)
	}
}

// side is whose listener is meant for connections from h to an address.
func (w *world) side(h *netns.Host, to netip.AddrPort) string {
	name := "pods"
	if h == w.Node {
		name = "host"
	}
	if to.Addr().Is4() {
		return name + "4"
	}
	return name + "6"
}

// echo proves that an open connection still carries bytes.
func echo(c net.Conn) error {
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return err
	}
	if _, err := c.Write([]byte("x")); err != nil {
		return err
	}
	var b [1]byte
	if _, err := c.Read(b[:]); err != nil {
		return err
	}
	if b[0] != 'x' {
		return fmt.Errorf("echo gave %q", b)
	}
	return nil
}
