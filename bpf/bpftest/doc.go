// Package bpftest is the decision of mode ebpf in a program that tests can run;
// no binary of ours holds it.
package bpftest

//go:generate bpf2go -go-package bpftest -target bpfel,bpfeb -cc clang -output-stem decide -type kw_case Decide decide.c
