package cgroupbpf

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/bpf"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

// installed is one loading of the programs with their maps, and the links by
// which they are attached. Its methods are for one goroutine at a time.
type installed struct {
	root    Root
	dir     string // of the pins
	netns   uint64 // cookie of the host's network namespace
	objects bpf.KaswayObjects
	inner   *ebpf.MapSpec
	links   map[string]*hooked
	refuse  bool
	fresh   bool     // a hook ran nothing of ours until now
	made    []string // pins of links that were not there before
}

// newInstalled loads the programs; they are attached nowhere yet.
func newInstalled(root Root, pinDir string, netns uint64) (*installed, error) {
	in := &installed{root: root, dir: pinsOf(pinDir, root), netns: netns, links: map[string]*hooked{}}
	spec, err := bpf.LoadKasway()
	if err != nil {
		return nil, fmt.Errorf("reading the programs: %w", err)
	}
	if err := withoutDecoration(spec); err != nil {
		return nil, fmt.Errorf("preparing the programs: %w", err)
	}
	in.inner = spec.Maps[bpf.KaswayMapKwTargets].InnerMap
	if err := loadInto(spec, &in.objects); err != nil {
		return nil, err
	}
	return in, nil
}

// loadInto loads spec for the kernel's bpf_set_retval, or else without: a kernel
// that does not have it (before 5.18) refuses the first.
func loadInto(spec *ebpf.CollectionSpec, objects *bpf.KaswayObjects) error {
	err := load(spec, objects, true)
	var verifier *ebpf.VerifierError
	if errors.As(err, &verifier) || errors.Is(err, unix.EINVAL) {
		if second := load(spec, objects, false); second == nil {
			return nil
		}
	}
	return err
}

// load is a variable so that tests can play a kernel without bpf_set_retval.
var load = func(spec *ebpf.CollectionSpec, objects *bpf.KaswayObjects, retval bool) error {
	has := uint8(0)
	if retval {
		has = 1
	}
	if err := spec.Variables[bpf.KaswayVarKwHasRetval].Set(has); err != nil {
		return fmt.Errorf("preparing the programs: %w", err)
	}
	if err := spec.LoadAndAssign(objects, nil); err != nil {
		return fmt.Errorf("loading the programs: %w", err)
	}
	return nil
}

// set gives the programs a state: what is diverted is replaced in one step.
func (in *installed) set(s rules.State) error {
	if len(s.Diverts) == 0 {
		return errors.New("the state has no target")
	}
	entries := rules.RenderBPF(s)
	if n := len(entries); n > int(in.inner.MaxEntries) {
		return fmt.Errorf("the targets have %d addresses with their ports, and mode ebpf holds %d: "+
			"write prefixes instead of single addresses, or choose another mode", n, in.inner.MaxEntries)
	}
	trie, err := ebpf.NewMap(in.inner)
	if err != nil {
		return fmt.Errorf("making the map of targets: %w", err)
	}
	defer trie.Close() // the kernel keeps it as long as the programs can reach it
	for _, e := range entries {
		if err := trie.Put(key(e), target(s, e.Divert)); err != nil {
			return fmt.Errorf("diverting %s port %d: %w", e.Prefix, e.Port, err)
		}
	}
	in.refuse = s.WhenDown == rules.Refuse
	err = errors.Join(
		in.objects.KwConfig.Put(uint32(0), in.config(s)),
		in.objects.KwTargets.Put(uint32(0), trie))
	if err != nil {
		return fmt.Errorf("replacing what is diverted: %w", err)
	}
	return nil
}

func (in *installed) config(s rules.State) bpf.KaswayKwCfg {
	c := bpf.KaswayKwCfg{
		HostNetns: in.netns, MaxAge: uint64(intercept.HeartbeatTimeout.Nanoseconds()),
		Mark: s.Mark, MarkMask: s.MarkMask,
		Host: flag(s.Clients.Host), Pods: flag(s.Clients.Pods), RefuseWhenDown: flag(s.WhenDown == rules.Refuse),
	}
	if s.Node4.IsValid() {
		c.Node4 = s.Node4.As16()
	}
	if s.Node6.IsValid() {
		c.Node6 = s.Node6.As16()
	}
	return c
}

func flag(b bool) uint8 {
	if b {
		return 1
	}
	return 0
}

// beforeAddress counts the bits of a key before the address: port and family.
const beforeAddress = 32

// key is that of the trie: v4 is v4-mapped, its prefix 96 bits longer.
func key(e rules.BPFEntry) bpf.KaswayKwKey {
	bits, v6 := e.Prefix.Bits(), uint16(1)
	if e.Prefix.Addr().Is4() {
		bits, v6 = bits+96, 0
	}
	return bpf.KaswayKwKey{Bits: uint32(beforeAddress + bits), Port: networkOrder(e.Port), V6: v6, Addr: e.Prefix.Addr().As16()}
}

func target(s rules.State, index int) bpf.KaswayKwTarget {
	p := s.Diverts[index].Ports
	// Without an address of the node there is nowhere to divert pods to.
	if !s.Node4.IsValid() {
		p.Pod4 = 0
	}
	if !s.Node6.IsValid() {
		p.Pod6 = 0
	}
	return bpf.KaswayKwTarget{
		Index: uint32(index), Refused: flag(s.Diverts[index].Refused),
		Port: [4]uint16{networkOrder(p.Host4), networkOrder(p.Host6), networkOrder(p.Pod4), networkOrder(p.Pod6)},
	}
}

// networkOrder is a number whose bytes in memory are in network order.
func networkOrder(v uint16) uint16 {
	var b [2]byte
	binary.BigEndian.PutUint16(b[:], v)
	return binary.NativeEndian.Uint16(b[:])
}

// beat writes the time that the programs compare with.
func (in *installed) beat() error {
	now, err := monotonic()
	if err == nil {
		err = in.objects.KwBeat.Put(uint32(0), now)
	}
	if err != nil {
		return fmt.Errorf("heartbeat: %w", err)
	}
	return nil
}

// monotonic is the clock of the programs, in ns.
func monotonic() (uint64, error) {
	var now unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_MONOTONIC, &now); err != nil {
		return 0, fmt.Errorf("reading the clock: %w", err)
	}
	return uint64(now.Nano()), nil
}

// silence makes the heartbeat stale at once.
func (in *installed) silence() error { return in.objects.KwBeat.Put(uint32(0), uint64(0)) }

// exempt lets a socket of ours pass. The map forgets the oldest by itself.
func (in *installed) exempt(cookie uint64) {
	// The mark exempts it too; this is for where policy takes marks away.
	_ = in.objects.KwOwn.Put(cookie, uint8(1))
}

// there reports that the cgroup still exists.
func (r Root) there() bool {
	d, err := look(r.Path)
	return err == nil && d.inode == r.ID && !d.dead
}

// close gives back the descriptors. What is pinned stays, with its maps.
func (in *installed) close() error {
	errs := []error{in.objects.Close()}
	for _, l := range in.links {
		errs = append(errs, l.link.Close())
	}
	return errors.Join(errs...)
}
