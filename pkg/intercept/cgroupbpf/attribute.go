package cgroupbpf

import (
	"encoding/binary"
	"net/netip"

	"github.com/cilium/ebpf"

	"github.com/kasway/kasway/bpf"
	"github.com/kasway/kasway/pkg/intercept"
)

// flows are the maps in which the programs say who connected. The descriptors are
// copies of their own: they outlive the installation.
type flows struct{ host, pods *ebpf.Map }

func (in *installed) flows() (*flows, error) {
	host, err := in.objects.KwFlowsHost.Clone()
	if err != nil {
		return nil, err
	}
	pods, err := in.objects.KwFlowsPod.Clone()
	if err != nil {
		_ = host.Close() // nothing was read from it
		return nil, err
	}
	return &flows{host, pods}, nil
}

// Attribute implements intercept.Attributor.
func (m *Mode) Attribute(t intercept.Taken) (a intercept.Attribution, known bool) {
	m.whose.RLock()
	defer m.whose.RUnlock()
	if m.flows == nil {
		return a, false
	}
	in := m.flows.pods
	if t.Side == intercept.HostSide {
		in = m.flows.host
	}
	k := bpf.KaswayKwFlow{Addr: t.Peer.Addr().As16(), Port: networkOrder(t.Peer.Port()), Listener: networkOrder(t.Local.Port())}
	var who bpf.KaswayKwWho
	if err := in.Lookup(k, &who); err != nil {
		return a, false // it never came, or others have pushed it out
	}
	_ = in.Delete(k) // the map forgets the oldest by itself
	if who.Ambiguous != 0 {
		return a, false
	}
	return attribution(who), true
}

func attribution(w bpf.KaswayKwWho) intercept.Attribution {
	var port [2]byte
	binary.NativeEndian.PutUint16(port[:], w.Port)
	return intercept.Attribution{
		Original: netip.AddrPortFrom(netip.AddrFrom16(w.Original).Unmap(), binary.BigEndian.Uint16(port[:])),
		CgroupID: w.Cgroup, UID: w.Uid, UIDKnown: true, PID: w.Pid, Command: command(w.Comm),
	}
}

// command is the text before the first zero; it may be any bytes.
func command(comm [16]int8) string {
	var b []byte
	for _, c := range comm {
		if c == 0 {
			break
		}
		b = append(b, byte(c))
	}
	return string(b)
}
