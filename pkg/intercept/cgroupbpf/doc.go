// Package cgroupbpf is mode ebpf: programs on the connect hooks of a cgroup divert
// connections before any address translation, for every process and pod below it.
//
// The programs outlive the agent. They are pinned to a bpffs, and what they do
// while no agent lives is decided by the age of its heartbeat; the next agent
// replaces them in place, so that no connect ever meets a node without hooks.
package cgroupbpf
