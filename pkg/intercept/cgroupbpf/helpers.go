package cgroupbpf

import (
	"errors"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/features"
)

// withoutDecoration takes out of the programs what only decorates an attribution
// and this process may not call: newer kernels give the name of a process to who
// has CAP_PERFMON, which is asked for by nothing else here. The command is then
// not known.
func withoutDecoration(spec *ebpf.CollectionSpec) error {
	err := features.HaveProgramHelper(ebpf.CGroupSockAddr, asm.FnGetCurrentComm)
	if !errors.Is(err, ebpf.ErrNotSupported) {
		return err
	}
	for _, p := range spec.Programs {
		for i, ins := range p.Instructions {
			if ins.IsBuiltinCall() && asm.BuiltinFunc(ins.Constant) == asm.FnGetCurrentComm {
				// As if it had failed, which leaves the buffer as it is: zero.
				p.Instructions[i] = asm.Mov.Imm(asm.R0, -1).WithMetadata(ins.Metadata)
			}
		}
	}
	return nil
}
