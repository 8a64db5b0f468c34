package cgroupbpf_test

import (
	"encoding/json"
	"net/netip"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

const port = 6443

// scene is a node whose KAS nobody serves, with the mode on: what is not diverted
// is refused by the control plane's host.
type scene struct {
	*netns.Topology
	holder *intercepttest.Holder
	state  rules.State
}

func newScene(t *testing.T, f intercepttest.Factory, when rules.WhenDown) *scene {
	t.Helper()
	s := &scene{Topology: netns.New(t, netns.Spec{RoutedPods: 1, Neighbour: true})}
	s.holder = s.start(t, f)
	var err error
	if s.state, err = s.holder.Apply(intercepttest.State(when)); err != nil {
		t.Fatal(err)
	}
	return s
}

func (s *scene) start(t *testing.T, f intercepttest.Factory) *intercepttest.Holder {
	t.Helper()
	h, err := intercepttest.Start(s.Node, f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the holder logged:\n%s", h.Log())
		}
	})
	return h
}

var (
	kas4    = netip.AddrPortFrom(netns.KAS4, port)
	kas6    = netip.AddrPortFrom(netns.KAS6, port)
	mapped4 = netip.AddrPortFrom(netip.AddrFrom16(netns.KAS4.As16()), port)
)

// diverted asks the listener who it is.
func (s *scene) diverted(t *testing.T, from *netns.Host, spec socketSpec, peer netip.AddrPort) {
	t.Helper()
	spec.Request = "nonce\n"
	r, err := connectFrom(from, spec)
	if err != nil || r.Errno != 0 {
		t.Errorf("%+v: %v, %v", spec, unix.Errno(r.Errno), err)
		return
	}
	var a intercepttest.Answer
	if err := json.Unmarshal([]byte(r.Reply), &a); err != nil || a.Who != "kas" {
		t.Errorf("%+v: reached %q (%v), want the listener of kas", spec, strings.TrimSpace(r.Reply), err)
	}
	if r.Peer != peer {
		t.Errorf("%+v: getpeername says %s, want %s", spec, r.Peer, peer)
	}
}

// refused is met by what is not diverted here, and by what is refused.
func (s *scene) refused(t *testing.T, what string, from *netns.Host, spec socketSpec) {
	t.Helper()
	if r, err := connectFrom(from, spec); err != nil || unix.Errno(r.Errno) != unix.ECONNREFUSED {
		t.Errorf("%s: %+v: %v, %v; want ECONNREFUSED", what, spec, unix.Errno(r.Errno), err)
	}
}

// Every kind of socket is diverted, and told the address that it dialled.
func TestEveryKindOfSocket(t *testing.T) {
	t.Parallel()
	s := newScene(t, modern, rules.Refuse)
	pod := s.RoutedPods[0]
	for _, from := range []*netns.Host{s.Node, pod} {
		for _, spec := range []socketSpec{
			{To: kas4}, {To: kas4, Block: true}, {To: kas4, TFO: true}, {To: kas4, Source: from.Addr4},
		} {
			s.diverted(t, from, spec, kas4)
		}
		for _, spec := range []socketSpec{
			{To: kas6, V6: true}, {To: kas6, V6: true, Block: true}, {To: kas6, V6: true, TFO: true}, {To: kas6, V6: true, Source: from.Addr6},
		} {
			s.diverted(t, from, spec, kas6)
		}
		s.diverted(t, from, socketSpec{To: mapped4, V6: true}, mapped4)
	}
	// A pod's device leads to the node, a host's device does not lead to lo.
	s.diverted(t, pod, socketSpec{To: kas4, Device: "eth0"}, kas4)
	s.refused(t, "bound to a device", s.Node, socketSpec{To: kas4, Device: netns.Uplink})
	s.refused(t, "our own mark", s.Node, socketSpec{To: kas4, Mark: 0x40})
	s.refused(t, "another port", s.Node, socketSpec{To: netip.AddrPortFrom(netns.KAS4, port+1)})
	if r, err := connectFrom(s.Node, socketSpec{To: kas4, UDP: true}); err != nil || r.Peer != kas4 {
		t.Errorf("a connected UDP socket has peer %s, %v; want %s: it is none of ours", r.Peer, err, kas4)
	}
	s.refused(t, "another host of the network", s.Neighbour, socketSpec{To: netip.AddrPortFrom(s.Node.Addr4, s.state.Diverts[0].Ports.Host4)})
}

// An MPTCP socket is diverted: the hook sees its first subflow. Its getpeername
// asks another socket, and shows the listener.
func TestCase_B57_MPTCP(t *testing.T) {
	t.Parallel()
	s := newScene(t, modern, rules.Refuse)
	for _, from := range []*netns.Host{s.Node, s.RoutedPods[0]} {
		spec := socketSpec{To: kas4, Proto: unix.IPPROTO_MPTCP, Request: "nonce\n"}
		r, err := connectFrom(from, spec)
		if err != nil || r.Errno != 0 || !strings.Contains(r.Reply, `"Who":"kas"`) {
			t.Errorf("MPTCP: reached %q, %v, %v", r.Reply, unix.Errno(r.Errno), err)
		}
	}
}

// The oldest kernels have neither bpf_set_retval nor SO_NETNS_COOKIE: the same is
// met by other ways, and a refusal is never EPERM.
func TestAncientKernel(t *testing.T) {
	t.Parallel()
	s := newScene(t, ancient, rules.Refuse)
	pod := s.RoutedPods[0]
	for _, from := range []*netns.Host{s.Node, pod} {
		s.diverted(t, from, socketSpec{To: kas4}, kas4)
		s.diverted(t, from, socketSpec{To: kas6, V6: true}, kas6)
	}
	if err := s.holder.Close(); err != nil {
		t.Fatal(err)
	}
	for _, from := range []*netns.Host{s.Node, pod} {
		for _, spec := range []socketSpec{{To: kas4}, {To: kas6, V6: true}, {To: mapped4, V6: true}} {
			s.refused(t, "guarded", from, spec)
		}
	}
}
