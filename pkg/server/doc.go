// Package server runs the process beside the kube-apiserver: it puts identity,
// policy, upstreams and the agents' tunnel together, starts them in order and
// stops them in reverse.
package server
