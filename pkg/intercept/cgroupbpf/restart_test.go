package cgroupbpf_test

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// attached fails unless each hook of the node runs exactly one program, and
// returns their links.
func (s *scene) attached(t *testing.T, when string) map[string]uint32 {
	t.Helper()
	all, err := netns.AttachedTo(s.NodeCgroup())
	if err != nil {
		t.Fatal(err)
	}
	links := map[string]uint32{}
	for _, a := range all {
		if links[a.Hook] != 0 {
			t.Errorf("%s: two programs on %s", when, a.Hook)
		}
		links[a.Hook] = a.Link
	}
	if len(links) != 5 {
		t.Errorf("%s: %d hooks have programs, want 5: %v", when, len(links), links)
	}
	return links
}

// Twenty agents, each killed, stopped or superseded by the next: the hooks run
// exactly one program all the time, over the links of the first one, and no
// connect gets past them.
func TestCase_B53_RestartsLeaveOneProgram(t *testing.T) {
	t.Parallel()
	s := newScene(t, modern, rules.Refuse)
	links := s.attached(t, "at first")
	programs, maps := s.objects(t)
	hammer := s.hammer()
	for i := range 20 {
		old := s.holder
		switch i % 3 {
		case 0: // killed
			if err := old.Kill(); err != nil {
				t.Fatal(err)
			}
			s.next(t)
		case 1: // stopped
			if err := errors.Join(old.Close(), old.End()); err != nil {
				t.Fatal(err)
			}
			s.next(t)
		case 2: // superseded: its Close leaves the successor's alone
			s.next(t)
			if err := old.Close(); err != nil {
				t.Fatal(err)
			}
			hammer.succeeds(t)
			if err := old.Kill(); err != nil { // End would take the addresses away
				t.Fatal(err)
			}
		}
		for hook, id := range s.attached(t, "after a restart") {
			if links[hook] != id {
				t.Errorf("the link of %s is another one: a moment without a hook", hook)
			}
		}
		hammer.succeeds(t)
	}
	hammer.stop(t)
	// What the first agent loaded is nobody's any more.
	if err := netns.Poll(10*time.Second, func() error {
		for _, id := range programs {
			if p, err := ebpf.NewProgramFromID(id); err == nil {
				return errors.Join(fmt.Errorf("program %d is still there", id), p.Close())
			}
		}
		for _, id := range maps {
			if m, err := ebpf.NewMapFromID(id); err == nil {
				return errors.Join(fmt.Errorf("map %d is still there", id), m.Close())
			}
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// objects are the ids of what the hooks run, and of the maps that this uses.
func (s *scene) objects(t *testing.T) (programs []ebpf.ProgramID, maps []ebpf.MapID) {
	t.Helper()
	all, err := netns.AttachedTo(s.NodeCgroup())
	if err != nil {
		t.Fatal(err)
	}
	for _, a := range all {
		p, err := ebpf.NewProgramFromID(ebpf.ProgramID(a.Program))
		if err != nil {
			t.Fatal(err)
		}
		info, err := p.Info()
		if err = errors.Join(err, p.Close()); err != nil {
			t.Fatal(err)
		}
		of, ok := info.MapIDs()
		if !ok || len(of) == 0 {
			t.Fatalf("the program of %s has no maps", a.Hook)
		}
		programs, maps = append(programs, ebpf.ProgramID(a.Program)), append(maps, of...)
	}
	return programs, maps
}

// next starts an agent and lets it take over.
func (s *scene) next(t *testing.T) {
	t.Helper()
	s.holder = s.start(t, modern)
	var err error
	if s.state, err = s.holder.Apply(intercepttest.State(rules.Refuse)); err != nil {
		t.Fatal(err)
	}
}

// hammer connects without an end. Only the listeners of the mode accept, and only
// the guard refuses with the control plane's host a router away: what gets past
// the hooks is seen by a listener there.
type hammer struct {
	s        *scene
	end      context.CancelFunc
	wg       sync.WaitGroup
	served   atomic.Int64
	strange  atomic.Value // error
	listener interface{ Close() error }
}

func (s *scene) hammer() *hammer {
	ctx, cancel := context.WithCancel(context.Background())
	h := &hammer{s: s, end: cancel}
	if l, err := s.ControlPlane.Listen("tcp", kas4.String()); err == nil {
		h.listener = l
		h.wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				h.strange.CompareAndSwap(nil, errors.New("a connect got past the hooks"))
				c.Close()
			}
		})
	}
	h.wg.Go(func() {
		for ctx.Err() == nil {
			f, err := intercepttest.Connect(s.Node, kas4, false, 5*time.Second)
			if err == nil {
				if _, err = f.Ask(5 * time.Second); err == nil {
					h.served.Add(1)
				}
				f.End()
				continue
			}
			if !errors.Is(err, unix.ECONNREFUSED) && !errors.Is(err, unix.ECONNRESET) {
				h.strange.CompareAndSwap(nil, err)
			}
		}
	})
	return h
}

// succeeds waits for connects that are served from now on.
func (h *hammer) succeeds(t *testing.T) {
	t.Helper()
	want := h.served.Load() + 3
	if err := netns.Poll(10*time.Second, func() error {
		if h.served.Load() < want {
			return errors.New("connects are not served")
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

func (h *hammer) stop(t *testing.T) {
	t.Helper()
	h.end()
	_ = h.listener.Close()
	h.wg.Wait()
	if err, _ := h.strange.Load().(error); err != nil {
		t.Error(err)
	}
}

// Another program of the same hook rewrites the ClusterIP to an endpoint, as
// Cilium's does: attached before ours or after, clients reach the listener.
func TestCase_B56_AnotherConnectProgram(t *testing.T) {
	t.Parallel()
	netns.Require(t)
	cluster := netip.AddrPortFrom(netns.ClusterIP4, 443)
	for _, first := range []bool{true, false} {
		topo := netns.New(t, netns.Spec{RoutedPods: 1})
		s := &scene{Topology: topo}
		s.holder = s.start(t, modern)
		rewrite := func() {
			p := socketLB(t, cluster, kas4)
			l, err := link.AttachCgroup(link.CgroupOptions{Path: topo.NodeCgroup(), Attach: ebpf.AttachCGroupInet4Connect, Program: p})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = l.Close() })
		}
		if first {
			rewrite()
			// The twin: it is at work.
			s.refused(t, "the other program alone", topo.Node, socketSpec{To: cluster})
		}
		if _, err := s.holder.Apply(intercepttest.State(rules.Refuse)); err != nil {
			t.Fatal(err)
		}
		if !first {
			rewrite()
		}
		for _, from := range []*netns.Host{topo.Node, topo.RoutedPods[0]} {
			peer := cluster
			if first {
				peer = kas4 // what ours was given
			}
			s.diverted(t, from, socketSpec{To: cluster}, peer)
			s.diverted(t, from, socketSpec{To: kas4}, kas4)
		}
	}
}

// socketLB rewrites connects to one address into those to another.
func socketLB(t *testing.T, from, to netip.AddrPort) *ebpf.Program {
	t.Helper()
	word := func(a netip.Addr) int32 { b := a.As4(); return int32(nativeWord(b[:])) }
	half := func(p uint16) int32 { return int32(nativeHalf(p)) }
	const userIP4, userPort = 4, 24 // struct bpf_sock_addr
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Name: "lab_socket_lb", Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{
			asm.Mov.Reg(asm.R6, asm.R1),
			asm.LoadMem(asm.R1, asm.R6, userIP4, asm.Word),
			asm.JNE.Imm32(asm.R1, word(from.Addr()), "pass"),
			asm.LoadMem(asm.R1, asm.R6, userPort, asm.Word),
			asm.JNE.Imm32(asm.R1, half(from.Port()), "pass"),
			asm.Mov.Imm32(asm.R1, word(to.Addr())),
			asm.StoreMem(asm.R6, userIP4, asm.R1, asm.Word),
			asm.Mov.Imm32(asm.R1, half(to.Port())),
			asm.StoreMem(asm.R6, userPort, asm.R1, asm.Word),
			asm.Mov.Imm(asm.R0, 1).WithSymbol("pass"),
			asm.Return(),
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// A kernel without BTF has no /sys/kernel/btf: the programs need none.
func TestCase_B58_NoBTF(t *testing.T) {
	t.Parallel()
	s := newScene(t, blind, rules.Refuse)
	s.diverted(t, s.Node, socketSpec{To: kas4}, kas4)
	s.diverted(t, s.RoutedPods[0], socketSpec{To: kas6, V6: true}, kas6)
}
