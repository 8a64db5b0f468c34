package intercepttest

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// The mark and the node-local addresses that the suite uses.
const mark = 0x40

var (
	node4 = netip.MustParseAddr("169.254.77.1")
	node6 = netip.MustParseAddr("fd6b:6173:7761:7979::1")
)

// Ports of the laboratory. Both targets use the same ones, on different
// addresses, so that a mode that looks at ports alone mixes them up.
const (
	servicePort  = 443
	endpointPort = 6443
	// otherPort is served at the KAS's addresses and belongs to no target.
	otherPort = 6444
)

// target is one of the two targets of every test.
type target struct {
	name             string
	cluster, address [2]netip.Addr // v4, v6
}

var targets = []target{
	{"kas", [2]netip.Addr{netns.ClusterIP4, netns.ClusterIP6}, [2]netip.Addr{netns.KAS4, netns.KAS6}},
	{"other", [2]netip.Addr{netip.MustParseAddr("10.96.0.2"), netip.MustParseAddr("fd00:96::2")},
		[2]netip.Addr{netip.MustParseAddr("172.30.0.11"), netip.MustParseAddr("fd00:30::11")}},
}

// State is the wanted state with both targets of the suite, everything open
// and without ports.
func State(when rules.WhenDown) rules.State {
	s := rules.State{Generation: "conformance", Clients: rules.Clients{Host: true, Pods: true}, WhenDown: when,
		Mark: mark, MarkMask: mark, Node4: node4, Node6: node6}
	for _, t := range targets {
		d := rules.Divert{Name: t.name}
		for i := range 2 {
			d.Entries = append(d.Entries,
				rules.Entry{Prefix: single(t.cluster[i]), Port: servicePort},
				rules.Entry{Prefix: single(t.address[i]), Port: endpointPort})
		}
		s.Diverts = append(s.Diverts, d)
	}
	return s
}

func single(a netip.Addr) netip.Prefix { return netip.PrefixFrom(a, a.BitLen()) }

// destination is one address of a target.
type destination struct {
	target string
	kind   string // "ClusterIP", "endpoint" or, of a mode's own, "place"
	v6     bool
	addr   netip.AddrPort
	// endpoint is where the KAS sees the connection when it is not diverted.
	endpoint netip.AddrPort
}

// cell is one row of the matrix: a client and a destination.
type cell struct {
	client *netns.Host
	label  string // "host", "routed pod", "bridge pod"
	pod    bool
	to     destination
}

func (c cell) String() string {
	family := "v4"
	if c.to.v6 {
		family = "v6"
	}
	return fmt.Sprintf("%-10s %s %-9s", c.label, family, c.to.kind)
}

// own is the client's own address of the destination's family.
func (c cell) own() netip.Addr {
	if c.to.v6 {
		return c.client.Addr6
	}
	return c.client.Addr4
}

// Node is what of a node a preflight may have to judge.
type Node struct {
	KubeProxy netns.KubeProxy
	// BridgePods: there are pods on a bridge. BridgeNF: its packets pass the
	// host's packet filters.
	BridgePods, BridgeNF bool
}

// world is a topology with a KAS that answers and one kind of kube-proxy.
type world struct {
	*netns.Topology
	node Node
	kas  *answerer
}

// newWorld builds it; the caller closes it.
func newWorld(n Node) (*world, error) {
	proxy := n.KubeProxy
	plan := netns.DefaultPlan()
	plan.KAS = nil
	var services []netns.Service
	for _, t := range targets {
		for i := range 2 {
			plan.KAS = append(plan.KAS, t.address[i])
			if proxy == netns.NoKubeProxy {
				// Whoever translates services then, it is not this node.
				plan.KAS = append(plan.KAS, t.cluster[i])
			}
			services = append(services, netns.Service{
				ClusterIP: netip.AddrPortFrom(t.cluster[i], servicePort),
				Endpoint:  netip.AddrPortFrom(t.address[i], endpointPort),
				Pods:      []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd00:77::/32")}[i]})
		}
	}
	spec := netns.Spec{RoutedPods: 1, BridgeNF: n.BridgeNF, Plan: &plan}
	if n.BridgePods {
		spec.BridgePods = 1
	}
	topo, err := netns.Build(spec)
	if err != nil {
		return nil, err
	}
	w := &world{Topology: topo, node: n, kas: newAnswerer()}
	err = topo.Node.InstallKubeProxy(proxy, services...)
	for _, a := range plan.KAS {
		for _, port := range []uint16{servicePort, endpointPort, otherPort} {
			err = errors.Join(err, w.answerAt(topo.ControlPlane, netip.AddrPortFrom(a, port), direct))
		}
	}
	if err != nil {
		return nil, errors.Join(err, w.close())
	}
	return w, nil
}

// answerAt answers at an address of h as who.
func (w *world) answerAt(h *netns.Host, addr netip.AddrPort, who string) error {
	l, err := h.Listen("tcp", addr.String())
	if err != nil {
		return err
	}
	w.kas.serve(l, who, "")
	return nil
}

func (w *world) close() error {
	err := w.Close() // first: it ends the holders, whose connections we answer
	w.kas.close()
	return err
}

// clients are cells without a destination.
func (w *world) clients() []cell {
	all := []cell{
		{client: w.Node, label: "host"},
		{client: w.RoutedPods[0], label: "routed pod", pod: true},
	}
	for _, p := range w.BridgedPods {
		all = append(all, cell{client: p, label: "bridge pod", pod: true})
	}
	return all
}

// taken are all cells for the given targets whose connections mode f takes:
// those of cells, or those of its own places.
func (w *world) taken(f Factory, names ...string) (all []cell) {
	if f.Places == nil {
		return w.cells(names...)
	}
	for _, c := range w.clients() {
		for _, n := range names {
			for _, at := range f.Places[n] {
				c.to = destination{target: n, kind: "place", v6: at.Addr().Is6(), addr: at}
				all = append(all, c)
			}
		}
	}
	return all
}

// cells are all rows for the given targets' own addresses.
func (w *world) cells(names ...string) (all []cell) {
	for _, client := range w.clients() {
		for _, t := range targets {
			for i, v6 := range []bool{false, true} {
				ep := netip.AddrPortFrom(t.address[i], endpointPort)
				svc := destination{t.name, "ClusterIP", v6, netip.AddrPortFrom(t.cluster[i], servicePort), ep}
				if w.node.KubeProxy == netns.NoKubeProxy {
					svc.endpoint = svc.addr
				}
				for _, d := range []destination{svc, {t.name, "endpoint", v6, ep, ep}} {
					for _, n := range names {
						if n == t.name {
							c := client
							c.to = d
							all = append(all, c)
						}
					}
				}
			}
		}
	}
	return all
}

// Connect connects from a host as any process there would, for at most within;
// withMark sets the mark of Kasway's own sockets before it does.
func Connect(from *netns.Host, to netip.AddrPort, withMark bool, within time.Duration) (*Flow, error) {
	d := dialer(withMark)
	d.Timeout = within
	c, err := from.DialWith(context.Background(), d, "tcp", to.String())
	if err != nil {
		return nil, err
	}
	return NewFlow(c), nil
}

func dialer(withMark bool) *net.Dialer {
	if !withMark {
		return &net.Dialer{}
	}
	return &net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		control := raw.Control(func(fd uintptr) {
			err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, mark)
		})
		return errors.Join(control, os.NewSyscallError("SO_MARK", err))
	}}
}
