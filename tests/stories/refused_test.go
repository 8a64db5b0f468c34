package stories

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// The agent asks for what its server does not allow, the control plane's etcd:
// the client is reset at once, nothing is dialled, and the refusal is on record.
func TestCase_B68_DestinationNotAllowed(t *testing.T) {
	t.Parallel()
	s := listenScene.take(t)
	accepted := accepts(t, s.ControlPlane, etcd)
	if err := (netns.Probe{From: s.ControlPlane, To: etcd}).Reach(patience); err != nil {
		t.Fatal(err) // or nothing would be shown by its not being dialled
	}
	shut(next(t, accepted))
	const counter = `kasway_server_refused_total{reason="unknown-target"}`
	was, from := metric(t, s.server, counter), len(s.server.Log())
	same := s.steady(t)
	for _, h := range s.clients() {
		start := time.Now()
		isCut(t, h.Label, h, netip.AddrPortFrom(bind, etcdPort))
		t.Logf("%s: reset after %s", h.Label, time.Since(start).Round(time.Millisecond))
	}
	rises(t, s.server, counter, was, 3)
	logged(t, s.server, from, "refused by policy", "spiffe://kasway/agent/node", etcd.String(), "unknown-target")
	if n := len(accepted); n != 0 {
		t.Errorf("etcd has seen %d connections", n)
	}
	same()
}

// The KAS goes down: who finds that out is reset, because its bytes have left
// with the question. From then on connections are held, since the server says
// so on Control: served when the KAS is back, or reset when the hold ends.
func TestUpstreamRefused(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	// Nobody listens at the target "raw" yet.
	same := s.steady(t)
	isCut(t, "the first client", s.Node, raw4)
	if err := netns.Poll(patience, func() error {
		if s.agent.Ready() == nil {
			return errors.New("the agent has not heard that the upstream is down")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
	logged(t, s.server, 0, "upstream is down", raw4.String(), `"reason":"refused"`)
	start := time.Now()
	isReset(t, "a client that nobody serves", connect(t, s.Node, raw4), 8*time.Second)
	if took := time.Since(start); took < 4500*time.Millisecond {
		t.Errorf("reset after %s, want 5 s", took)
	}
	held := connect(t, s.Node, raw4)
	greet(t, held, "still here")
	far := accepts(t, s.ControlPlane, raw4)
	shut(saying(t, far, "still here"))
	shut(held)
	if metric(t, s.server, `kasway_server_upstream_dials_total{address="`+raw4.String()+`",result="refused",upstream="raw"}`) == 0 {
		t.Error("no refused dial was counted")
	}
	s.served(t, s.Node, svc4) // the other target was never touched
	same()
}

// With whenUnreachable: refuse a client is told the truth while the KAS is down.
func TestUnreachableIsRefusedWhereAskedFor(t *testing.T) {
	t.Parallel()
	for _, mode := range []string{"nft", "iptables", "listen"} {
		t.Run(mode, func(t *testing.T) {
			t.Parallel()
			s := newScene(t, netns.Spec{RoutedPods: 1})
			to, flags := []netip.AddrPort{raw4, raw6}, diverting(mode)
			if mode == "listen" {
				to = []netip.AddrPort{netip.AddrPortFrom(bind, rawPort)}
				flags = []string{"--mode", mode, "--bind-address", bind.String(), "--target", "7000:" + raw4.String()}
			}
			if err := s.startServer("--allowed-destination", raw4.String()); err != nil {
				t.Fatal(err)
			}
			s.startAgent(t, append(flags, "--when-unreachable", "refuse")...)
			for _, h := range s.clients() {
				for _, at := range to {
					err := netns.Poll(patience, func() error {
						c, err := dial(t, h, at)
						if err == nil {
							shut(c)
							return errors.New("connected")
						}
						// Until the first failure the target is open; who is taken
						// then is reset.
						if errors.Is(err, syscall.ECONNRESET) {
							return err
						}
						if !errors.Is(err, syscall.ECONNREFUSED) {
							t.Errorf("%s: %v", h.Label, err)
						}
						return nil
					})
					if err != nil {
						t.Errorf("%s to %s: want ECONNREFUSED: %v", h.Label, at, err)
					}
				}
			}
			far := accepts(t, s.ControlPlane, raw4)
			for _, h := range s.clients() {
				for _, at := range to {
					err := netns.Poll(patience, func() error {
						c, err := dial(t, h, at)
						if err != nil {
							return err
						}
						defer shut(c)
						_, err = c.Write([]byte("x"))
						return err
					})
					if err != nil {
						t.Errorf("%s to %s after the upstream's return: %v", h.Label, at, err)
						continue
					}
					shut(next(t, far))
				}
			}
		})
	}
}

// dropped is an address of the control plane that answers no SYN.
const dropped = "198.51.100.7:6443"

// An upstream that drops SYNs costs the time-out of one dial, and clients then
// meet what they meet when it is down.
func TestDialTimeout(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	open := s.blackHole(t)
	file := s.serverFile(t, `upstreams:
- {name: kas, addresses: ["`+kas4.String()+`"]}
- {name: raw, addresses: ["`+dropped+`"], dialTimeout: 500ms}
policy: {agents: [{identity: "*", targets: ["*"]}]}
`)
	if err := s.startServerFile(file); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, diverting("nft", "--hold", "1s")...)
	same := s.steady(t)
	start := time.Now()
	isReset(t, "the client", connect(t, s.Node, raw4), 5*time.Second)
	if took := time.Since(start); took < 500*time.Millisecond {
		t.Errorf("reset after %s, before the dial can have timed out", took)
	}
	rises(t, s.server, `kasway_server_upstream_dials_total{address="`+dropped+`",result="timeout",upstream="raw"}`, 0, 1)
	logged(t, s.server, 0, "upstream is down", dropped, "timeout")
	s.served(t, s.Node, svc4)
	far := open()
	logged(t, s.server, 0, "upstream is up again", dropped)
	c, f := pair(t, s.Node, raw4, far)
	shut(c, f)
	same() // no probe is under way any more
}

// Of two upstreams the nearest is used, and the other one when that is down.
func TestTwoUpstreams(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	far4, far6 := accepts(t, s.ControlPlane, raw4), (<-chan *net.TCPConn)(nil)
	if err := s.startServer("--upstream", "kas="+kas4.String(), "--upstream", "raw="+raw6.String()+","+raw4.String()); err == nil {
		t.Fatal("two upstreams of one name are accepted")
	}
	var err error
	if s.server, err = s.Server(kas4.String(), "--upstream", "raw="+raw6.String()+","+raw4.String(), "--grant", "*=raw"); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, diverting("nft")...)
	same := s.steady(t)
	c, f := pair(t, s.Node, raw4, far4) // the first one refuses
	shut(c, f)
	logged(t, s.server, 0, "upstream is down", raw6.String(), "refused")
	if err := s.agent.Ready(); err != nil {
		t.Errorf("one of two upstreams is up, and the agent is not ready: %v", err)
	}
	far6 = accepts(t, s.ControlPlane, raw6)
	logged(t, s.server, 0, "upstream is up again", raw6.String())
	for len(far6) > 0 { // the probe that found out
		shut((<-far6))
	}
	c, f = pair(t, s.Node, raw4, far6)
	shut(c, f)
	same()
}

// blackHole makes the address dropped; open lets SYNs through, to who accepts.
func (s *scene) blackHole(t *testing.T) (open func() <-chan *net.TCPConn) {
	t.Helper()
	at := netip.MustParseAddrPort(dropped)
	if err := s.ControlPlane.AddAddr("lo", netip.PrefixFrom(at.Addr(), 32)); err != nil {
		t.Fatal(err)
	}
	const hole = `table inet hole { chain in { type filter hook input priority -10; ip daddr 198.51.100.7 drop; }; }`
	if _, err := s.ControlPlane.RunInput(hole, "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	return func() <-chan *net.TCPConn {
		far := accepts(t, s.ControlPlane, at)
		if _, err := s.ControlPlane.Run("nft", "delete", "table", "inet", "hole"); err != nil {
			t.Fatal(err)
		}
		return far
	}
}

// serverFile writes a configuration; identity and listeners come by flags.
func (s *scene) serverFile(t *testing.T, text string) string {
	t.Helper()
	return s.file(t, "server.yaml", "apiVersion: kasway.dev/v1alpha1\nkind: ServerConfig\n"+text)
}

func (s *scene) file(t *testing.T, name, text string) string {
	t.Helper()
	path := s.Path(name)
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
	return path
}

func (s *scene) startServerFile(file string) (err error) {
	s.server, err = s.Server("", "-f", file)
	return err
}

// A client that gives up while the server dials is noticed there: the dial is
// cancelled, and nothing of it stays open.
func TestClientGivesUpWhileDialling(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	s.blackHole(t)
	if err := s.startServerFile(s.serverFile(t, `upstreams:
- {name: kas, addresses: ["`+kas4.String()+`"]}
- {name: raw, addresses: ["`+dropped+`"], dialTimeout: 30s}
policy: {agents: [{identity: "*", targets: ["*"]}]}
`)); err != nil {
		t.Fatal(err)
	}
	s.startAgent(t, diverting("nft")...)
	same := s.steady(t)
	dialling := func(want int) error {
		out, err := s.ControlPlane.Run("ss", "-Htn", "state", "syn-sent")
		if n := strings.Count(out, "\n"); err == nil && n != want {
			err = fmt.Errorf("%d dials are under way, want %d", n, want)
		}
		return err
	}
	clients := []*net.TCPConn{connect(t, s.Node, raw4), connect(t, s.Node, raw4), connect(t, s.Node, raw4)}
	if err := netns.Poll(patience, func() error { return dialling(len(clients)) }); err != nil {
		t.Fatal(err)
	}
	for _, c := range clients {
		reset(t, c)
	}
	if err := netns.Poll(5*time.Second, func() error { return dialling(0) }); err != nil {
		t.Errorf("after the clients have gone: %v", err)
	}
	if err := s.agent.Ready(); err != nil {
		t.Errorf("clients that give up say nothing about the upstream: %v", err)
	}
	same()
}
