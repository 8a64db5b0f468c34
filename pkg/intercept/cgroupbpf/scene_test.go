package cgroupbpf

import (
	"net"
	"net/netip"
	"testing"

	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// inProcess is an installation of this process's own on a node of a laboratory,
// with listeners that only the test accepts from.
type inProcess struct {
	*netns.Topology
	mode       *Mode
	host, pods map[string]net.Listener // by target
}

var testNode4 = netip.MustParseAddr("169.254.77.1")

// atPort is an endpoint of the KAS; the two targets differ by the port alone.
func atPort(port uint16) netip.AddrPort { return netip.AddrPortFrom(netns.KAS4, port) }

var targetPorts = map[string]uint16{"kas": 6443, "other": 7443}

func newInProcess(t *testing.T, spec netns.Spec) *inProcess {
	t.Helper()
	p := &inProcess{Topology: netns.New(t, spec), mode: New(Config{}), host: map[string]net.Listener{}, pods: map[string]net.Listener{}}
	if err := p.Node.AddAddr("lo", netip.PrefixFrom(testNode4, 32)); err != nil {
		t.Fatal(err)
	}
	s := rules.State{
		Clients: rules.Clients{Host: true, Pods: true}, WhenDown: rules.Refuse,
		Mark: intercept.Mark, MarkMask: intercept.Mark, Node4: testNode4,
	}
	for _, name := range []string{"kas", "other"} {
		p.host[name], p.pods[name] = p.listen(t, "127.0.0.1"), p.listen(t, testNode4.String())
		s.Diverts = append(s.Diverts, rules.Divert{
			Name: name, Entries: []rules.Entry{{Prefix: netip.PrefixFrom(netns.KAS4, 32), Port: targetPorts[name]}},
			Ports: rules.Ports{Host4: portOf(p.host[name]), Pod4: portOf(p.pods[name])},
		})
	}
	p.install(t, s)
	return p
}

func portOf(l net.Listener) uint16 { return uint16(l.Addr().(*net.TCPAddr).Port) }

func (p *inProcess) listen(t *testing.T, at string) net.Listener {
	t.Helper()
	l, err := p.Node.Listen("tcp4", at+":0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	return l
}

// install attaches the programs by links that end with the test.
func (p *inProcess) install(t *testing.T, s rules.State) {
	t.Helper()
	var st unix.Stat_t
	if err := unix.Stat(p.NodeCgroup(), &st); err != nil {
		t.Fatal(err)
	}
	var cookie uint64
	if err := p.Node.Do(func() (err error) { cookie, err = namespaceOfSocket(); return err }); err != nil {
		t.Fatal(err)
	}
	in, err := newInstalled(Root{Path: p.NodeCgroup(), ID: st.Ino}, t.TempDir(), cookie)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = in.close() })
	if err := in.set(s); err != nil {
		t.Fatal(err)
	}
	if err := in.beat(); err != nil {
		t.Fatal(err)
	}
	stop := intercept.StartHeartbeat(intercept.HeartbeatInterval, in.beat, p.mode.cfg.Log, nil)
	t.Cleanup(stop)
	for _, h := range hooks {
		l, err := link.AttachCgroup(link.CgroupOptions{Path: p.NodeCgroup(), Attach: h.attach, Program: h.program(in)})
		if err != nil {
			t.Fatalf("%s: %v", h.name, err)
		}
		t.Cleanup(func() { _ = l.Close() })
	}
	f, err := in.flows()
	if err != nil {
		t.Fatal(err)
	}
	p.mode.know(f)
	t.Cleanup(func() { p.mode.know(nil) })
	p.mode.installed = in
}

// accept takes the next connection of a listener and asks who it is.
func (p *inProcess) accept(t *testing.T, l net.Listener, side intercept.Side) (a intercept.Attribution, known bool, of intercept.Taken) {
	t.Helper()
	c, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	end := func(a net.Addr) netip.AddrPort {
		at := a.(*net.TCPAddr).AddrPort()
		return netip.AddrPortFrom(at.Addr().Unmap(), at.Port())
	}
	of = intercept.Taken{Side: side, Peer: end(c.RemoteAddr()), Local: end(c.LocalAddr())}
	a, known = p.mode.Attribute(of)
	return a, known, of
}
