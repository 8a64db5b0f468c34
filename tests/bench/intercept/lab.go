package main

import "github.com/kasway/kasway/tests/netns"

// cgroupEnv tells the holder where mode ebpf attaches.
const cgroupEnv = "KASWAY_BENCH_CGROUP"

// startHolder starts the holder as an agent of the node.
func startHolder(topo *netns.Topology, mode string) (*worker, error) {
	cmd := topo.Node.Command("/proc/self/exe").Cgroup(netns.AgentUnit).BPFFS()
	return start(cmd, "holder "+mode, cgroupEnv+"="+topo.NodeCgroup())
}
