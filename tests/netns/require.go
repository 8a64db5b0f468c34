package netns

import (
	"errors"
	"os"

	vns "github.com/vishvananda/netns"
)

// T is what the wrappers need of testing.TB.
type T interface {
	Helper()
	Logf(format string, args ...any)
	Fatalf(format string, args ...any)
	Skipf(format string, args ...any)
	Cleanup(func())
}

// Require skips t, with the reason, where network namespaces cannot be made.
// With REQUIRE_PRIV=1 in the environment that is a failure instead: a skipped
// test must not look like a passed one in CI.
func Require(t T) {
	t.Helper()
	err := Available()
	if err == nil {
		return
	}
	if os.Getenv("REQUIRE_PRIV") == "1" {
		t.Fatalf("REQUIRE_PRIV=1: %v", err)
	}
	t.Skipf("%v", err)
}

// Available reports why network namespaces cannot be made here, or nil.
func Available() error {
	if os.Geteuid() != 0 {
		return errors.New("netns: needs root")
	}
	return onThread(func() error {
		ns, err := vns.New()
		if err != nil {
			return errors.Join(errors.New("netns: cannot make a network namespace"), err)
		}
		return ns.Close()
	})
}
