// Package netns is the laboratory: network namespaces joined into the
// topologies that Kasway is tested and shown in, described in words.
//
// A Lab holds Hosts; each Host is one network namespace in which functions,
// sockets and processes can be started. Nothing outside the namespaces (and an
// own sub-cgroup for the processes) is touched, and everything is gone after
// Close. Package functions return errors and serve plain programs; New and
// Require are the wrappers for tests.
package netns
