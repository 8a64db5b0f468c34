package cgroupbpf

import (
	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/bpf"
)

// PlayOldKernel makes this process see a kernel without bpf_set_retval (5.18) and
// without SO_NETNS_COOKIE (5.14).
func PlayOldKernel() {
	real := load
	load = func(spec *ebpf.CollectionSpec, objects *bpf.KaswayObjects, retval bool) error {
		if retval {
			return &ebpf.VerifierError{Cause: unix.EINVAL}
		}
		return real(spec, objects, retval)
	}
	namespaceOfSocket = func() (uint64, error) { return 0, unix.ENOPROTOOPT }
}
