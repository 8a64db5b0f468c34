package main

import (
	"fmt"
	"slices"

	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
)

// checkConntrack looks how full the kernel's table of connections is, where one
// of the modes that can be used depends on it; read is os.ReadFile.
func checkConntrack(usable []string, read func(path string) ([]byte, error)) []finding {
	if !slices.ContainsFunc(usable, func(mode string) bool { return mode != config.ModeEBPF && mode != config.ModeListen }) {
		return nil
	}
	c, there, err := intercept.ReadConntrack(read)
	if err == nil && !there {
		return nil // the kernel does not track connections yet
	}
	f := finding{Need: "connection tracking", State: stateOK, Detail: fmt.Sprintf("%d of %d", c.Count, c.Max)}
	switch {
	case err != nil:
		f.State, f.Detail = stateUnknown, err.Error()
	case c.NearlyFull():
		f.State = stateWarning
		f.Why = "once it is full, new connections are dropped, to the KAS too; mode ebpf does not depend on it"
		f.Remedy = "raise the sysctl net.netfilter.nf_conntrack_max, or find out with `conntrack -L` who keeps so many"
	}
	return []finding{f}
}
