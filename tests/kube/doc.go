// Package kube tests Kasway with a real Kubernetes: a control plane and a node
// in network namespaces, the node behind a firewall that lets it reach one port
// of the control plane, Kasway's. Its tests have the build tag kube; `make
// test-kube` runs them, FULL=1 in every combination.
package kube
