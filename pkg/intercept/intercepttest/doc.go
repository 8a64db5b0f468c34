// Package intercepttest is the conformance suite that every interception mode
// passes, and a Mode in memory for tests of what stands above the modes.
//
// A mode works in the namespace of its process. So the suite starts the test
// binary once more inside the node's namespace (the holder), makes the Mode
// there and talks to it over pipes; being a process of its own it can be
// killed and frozen. A test binary that calls the suite begins with
//
//	func TestMain(m *testing.M) { intercepttest.Main(m, factory) }
//
// What the suite has caught while it was made, on Linux 6.18:
//
//   - A packet that was diverted in output comes by again in prerouting on lo;
//     a guard there that looks at the original destination refuses it.
//   - nftables' "reject with tcp reset" for a packet that came over a bridge
//     (bridge-nf on) is sent past conntrack, in forward as in prerouting. If
//     kube-proxy has translated the packet before, the client gets a reset from
//     the endpoint's address, ignores it, and connect hangs. A guard must stand
//     before every translation, or lead to a closed port.
//   - When the last table with nat chains and ct expressions goes, the kernel
//     stops translating open connections too: they are reset. An empty nat chain
//     is not enough; a ct expression beside it is.
//   - A child process that renews a timeout outlives the killed agent.
package intercepttest
