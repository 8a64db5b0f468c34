package cgroupbpf

import (
	"bytes"
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"
	"time"

	"github.com/cilium/ebpf"

	"github.com/kasway/kasway/bpf"
	"github.com/kasway/kasway/bpf/bpftest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

const (
	hostCookie = 4711
	podCookie  = 4712
)

// judge runs the decision of the kernel's programs on what it is asked.
type judge struct {
	objects bpftest.DecideObjects
	in      installed // encodes as the mode does, and never attaches
}

func newJudge(t *testing.T) *judge {
	t.Helper()
	j := &judge{}
	if err := bpftest.LoadDecideObjects(&j.objects, nil); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = j.objects.Close() })
	spec, err := bpftest.LoadDecide()
	if err != nil {
		t.Fatal(err)
	}
	j.in = installed{netns: hostCookie, inner: spec.Maps[bpf.KaswayMapKwTargets].InnerMap}
	j.in.objects.KwTargets, j.in.objects.KwConfig = j.objects.KwTargets, j.objects.KwConfig
	return j
}

func (j *judge) decide(t *testing.T, c bpftest.DecideKwCase) bpftest.DecideKwCase {
	t.Helper()
	packet := bytes.NewBuffer(make([]byte, 14)) // the Ethernet header
	if err := binary.Write(packet, binary.NativeEndian, c); err != nil {
		t.Fatal(err)
	}
	out := make([]byte, packet.Len()+64)
	opts := &ebpf.RunOptions{Data: packet.Bytes(), DataOut: out}
	code, err := j.objects.KwDecideTest.Run(opts)
	if err != nil || code != 0 {
		t.Fatalf("running the decision: code %d, %v", code, err)
	}
	if err := binary.Read(bytes.NewReader(opts.DataOut[14:]), binary.NativeEndian, &c); err != nil {
		t.Fatal(err)
	}
	return c
}

// The kernel's decision and rules.State.Match name the same target for every
// destination, whatever prefixes lie within each other; and who is not diverted,
// refused or passed is so by the rules of the mode.
func TestDecisionIsThatOfMatch(t *testing.T) {
	netns.Require(t)
	seed := uint64(time.Now().UnixNano())
	t.Logf("seed %d", seed)
	r := rand.New(rand.NewPCG(seed, 1))
	j := newJudge(t)
	states, verdicts, several := 300, map[bpf.KaswayKwVerdict]int{}, 0
	for range states {
		s := randomState(r)
		if err := j.in.set(s); err != nil {
			t.Fatalf("%v: %+v", err, s)
		}
		for range 40 {
			dst, c := randomConnect(r)
			got := j.decide(t, c)
			verdict, target, port := expected(s, dst, c)
			if got.Verdict != uint32(verdict) || got.Target != target || verdict == bpf.KaswayKwVerdictKW_DIVERTED && got.Listener != networkOrder(port) {
				t.Fatalf("%s, %+v:\ngot verdict %d, target %d, listener %d\nwant verdict %d, target %d, listener %d\nstate %+v",
					dst, c, got.Verdict, int32(got.Target), networkOrder(got.Listener), verdict, int32(target), port, s)
			}
			verdicts[verdict]++
			if target != noTarget && target > 0 {
				several++
			}
		}
	}
	for v := range bpf.KaswayKwVerdictKW_VERDICTS {
		if verdicts[v] == 0 {
			t.Errorf("no case met verdict %d", v)
		}
	}
	if several == 0 {
		t.Error("no case met a target but the first")
	}
}

const noTarget = ^uint32(0)

// expected is the decision in Go.
func expected(s rules.State, dst netip.AddrPort, c bpftest.DecideKwCase) (v bpf.KaswayKwVerdict, target uint32, port uint16) {
	d, ok := s.Match(dst)
	if !ok {
		return bpf.KaswayKwVerdictKW_PASS, noTarget, 0
	}
	for i := range s.Diverts {
		if &s.Diverts[i] == d {
			target = uint32(i)
		}
	}
	host := c.In.Netns == hostCookie
	ports := map[[2]bool]uint16{
		{true, false}: d.Ports.Host4, {true, true}: d.Ports.Host6, {false, false}: d.Ports.Pod4, {false, true}: d.Ports.Pod6,
	}
	v6 := dst.Addr().Unmap().Is6()
	port = ports[[2]bool{host, v6}]
	if at := map[bool]netip.Addr{false: s.Node4, true: s.Node6}[v6]; !host && !at.IsValid() {
		port = 0 // there is nowhere to divert to
	}
	switch {
	case host && c.In.Mark&s.MarkMask == s.Mark, c.In.Own != 0:
		v = bpf.KaswayKwVerdictKW_OWN
	case host && !s.Clients.Host, !host && !s.Clients.Pods:
		v = bpf.KaswayKwVerdictKW_PASS
	case host && c.In.BoundDev != 0:
		v = bpf.KaswayKwVerdictKW_DEVICE
	case c.In.Now-c.In.Beat > uint64((2500 * time.Millisecond).Nanoseconds()):
		v = bpf.KaswayKwVerdictKW_STALE_PASSED
		if s.WhenDown == rules.Refuse {
			v = bpf.KaswayKwVerdictKW_STALE_REFUSED
		}
	case d.Refused:
		v = bpf.KaswayKwVerdictKW_REFUSED
	case port == 0:
		v = bpf.KaswayKwVerdictKW_PASS
	default:
		v = bpf.KaswayKwVerdictKW_DIVERTED
	}
	return v, target, port
}

// The universe is small, so that prefixes lie within each other and meet.
func randomAddr(r *rand.Rand) netip.Addr {
	if r.IntN(2) == 0 {
		return netip.AddrFrom4([4]byte{10, byte(r.IntN(2)), byte(r.IntN(2)), byte(r.IntN(3))})
	}
	return netip.AddrFrom16([16]byte{0: 0xfd, 7: byte(r.IntN(2)), 14: byte(r.IntN(2)), 15: byte(r.IntN(3))})
}

func randomPort(r *rand.Rand) uint16 { return []uint16{443, 6443}[r.IntN(2)] }

func randomState(r *rand.Rand) rules.State {
	s := rules.State{
		Clients: rules.Clients{Host: r.IntN(4) > 0, Pods: r.IntN(4) > 0}, Mark: 0x40, MarkMask: 0x40,
		WhenDown: []rules.WhenDown{rules.Refuse, rules.Direct}[r.IntN(2)],
		Node4:    []netip.Addr{{}, testNode4, testNode4}[r.IntN(3)],
		Node6:    []netip.Addr{{}, netip.IPv6Loopback(), netip.IPv6Loopback()}[r.IntN(3)],
	}
	for i := range 1 + r.IntN(4) {
		d := rules.Divert{Name: string(rune('a' + i)), Refused: r.IntN(5) == 0}
		for range r.IntN(4) {
			a := randomAddr(r)
			bits := a.BitLen()
			if r.IntN(2) == 0 {
				bits = []int{0, 7, 8, 15, 24, 31}[r.IntN(6)]
			}
			p, _ := a.Prefix(bits)
			d.Entries = append(d.Entries, rules.Entry{Prefix: p, Port: randomPort(r)})
		}
		port := func(base uint16) uint16 { return base * uint16(min(r.IntN(6), 1)) }
		first := 40000 + uint16(i)*10
		d.Ports = rules.Ports{Host4: port(first), Host6: port(first + 1), Pod4: port(first + 2), Pod6: port(first + 3)}
		s.Diverts = append(s.Diverts, d)
	}
	return s
}

func randomConnect(r *rand.Rand) (netip.AddrPort, bpftest.DecideKwCase) {
	dst := netip.AddrPortFrom(randomAddr(r), randomPort(r))
	if r.IntN(4) == 0 && dst.Addr().Is4() { // as a v4-mapped socket dials it
		dst = netip.AddrPortFrom(netip.AddrFrom16(dst.Addr().As16()), dst.Port())
	}
	c := bpftest.DecideKwCase{Addr: dst.Addr().As16(), Port: networkOrder(dst.Port())}
	c.In.Netns = []uint64{hostCookie, podCookie}[r.IntN(2)]
	c.In.V6 = flag(dst.Addr().Unmap().Is6())
	c.In.Now = 1e12
	c.In.Beat = c.In.Now - []uint64{0, 5e8, 2500e6, 2500e6 + 1, 1e12}[r.IntN(5)]
	c.In.Mark = []uint32{0, 0, 0, 0x40, 0x4040, 0x8000}[r.IntN(6)]
	c.In.BoundDev = uint32(max(0, r.IntN(6)-4))
	c.In.Own = uint8(max(0, r.IntN(6)-4))
	return dst, c
}
