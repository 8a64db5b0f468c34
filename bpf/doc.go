// Package bpf is the kernel side of mode ebpf: programs for the hooks of a cgroup,
// their maps, and the Go types that both share, generated from the C beside it.
package bpf

//go:generate bpf2go -go-package bpf -target bpfel,bpfeb -cc clang -output-stem kasway -type kw_cfg -type kw_key -type kw_target -type kw_flow -type kw_who -type kw_verdict Kasway kasway.c
