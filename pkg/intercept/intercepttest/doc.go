// Package intercepttest is the conformance suite that every interception mode
// passes, and a Mode in memory for tests of what stands above the modes.
//
// A mode works in the namespace of its process. So the suite starts the test
// binary once more inside the node's namespace (the holder), makes the Mode
// there and talks to it over pipes; being a process of its own it can be
// killed and frozen. A test binary that calls the suite begins with
//
//	func TestMain(m *testing.M) { intercepttest.Main(m, factory) }
package intercepttest
