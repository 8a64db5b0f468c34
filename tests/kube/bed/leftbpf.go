package bed

import (
	"fmt"
	"strings"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
)

// leftPrograms lists the programs of agents that are linked to a control group
// which is no more, as those of the bed are: something holds them. The kernel may
// take a moment to let them go.
func leftPrograms() (left []string) {
	for range 150 {
		var err error
		if left, err = orphanPrograms(); err != nil {
			return []string{"what cannot be listed: " + err.Error()}
		}
		if len(left) == 0 {
			return nil
		}
		time.Sleep(20 * time.Millisecond)
	}
	return left
}

func orphanPrograms() (orphans []string, err error) {
	all := link.Iterator{}
	defer all.Close()
	for all.Next() {
		info, err := all.Link.Info()
		if err != nil {
			return nil, fmt.Errorf("BPF link: %w", err)
		}
		group := info.Cgroup()
		if group == nil || group.CgroupId != 0 {
			continue // of another kind, or attached
		}
		p, err := ebpf.NewProgramFromID(info.Program)
		if err != nil {
			continue // gone meanwhile
		}
		what, err := p.Info()
		_ = p.Close()
		if err == nil && (strings.HasPrefix(what.Name, "kasway_") || strings.HasPrefix(what.Name, "kw_")) {
			orphans = append(orphans, fmt.Sprintf("BPF link %d of program %s", info.ID, what.Name))
		}
	}
	return orphans, all.Err()
}
