// Package netns is the laboratory: network namespaces joined into the
// topologies that Kasway is tested and shown in, described in words.
//
// A Lab holds Hosts; each Host is one network namespace in which functions,
// sockets and processes can be started. Nothing outside the namespaces (and an
// own sub-cgroup for the processes) is touched, and everything is gone after
// Close. Package functions return errors and serve plain programs; New and
// Require are the wrappers for tests.
//
// Hooks on cgroups see a socket by the cgroup of the task that made it. So each
// lab has a tree of cgroups of its own that looks like that of real machines:
//
//	<lab>/node                                     Topology.NodeCgroup, to attach to
//	<lab>/node/system.slice/kubelet.service        what the node dials and runs
//	<lab>/node/system.slice/kasway-agent.service   Cmd.Cgroup(AgentUnit)
//	<lab>/node/kubepods.slice/kubepods-burstable.slice/
//	    kubepods-burstable-pod<uid>.slice/cri-containerd-<id>.scope    each pod
//	<lab>/cp, <lab>/neighbour, ...                 the other hosts, outside of it
//
// Host.Dial and Host.DialWith connect from a process in the host's cgroup
// (Host.CgroupPath) and namespace, so they are seen; what a function given to
// Host.Do dials is in the namespace only. Host.Command runs in the same cgroup
// unless Cmd.Cgroup names another one, and Cmd.BPFFS gives it a bpffs of the
// lab's own at /sys/fs/bpf.
package netns
