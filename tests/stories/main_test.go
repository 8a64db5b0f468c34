package stories

import (
	"flag"
	"fmt"
	"os"
	"testing"

	"go.uber.org/goleak"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// bin is the folder of the binaries under test.
var bin string

func TestMain(m *testing.M) {
	if stage := os.Getenv(attackerEnv); stage != "" {
		os.Exit(attackerMain(stage))
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	if netns.Available() == nil {
		var err error
		if bin, err = os.MkdirTemp("", "kasway-bin-"); err != nil {
			return fail(err)
		}
		defer func() { _ = os.RemoveAll(bin) }() // in the folder for temporary files
		// Its processes stand for other users of the node, who must reach it.
		if err := os.Chmod(bin, 0o755); err != nil {
			return fail(err)
		}
		if err := stack.Build(bin, true); err != nil {
			return fail(err)
		}
	}
	// A process with the race detector sleeps for a second before it exits.
	if err := os.Setenv("GORACE", "atexit_sleep_ms=0"); err != nil {
		return fail(err)
	}
	// Most stories wait most of the time.
	if err := flag.Set("test.parallel", "8"); err != nil {
		return fail(err)
	}
	code := m.Run()
	for _, s := range []*shared{nftScene, iptablesScene, listenScene} {
		if err := s.close(); err != nil {
			code = fail(err)
		}
	}
	if code == 0 {
		if err := goleak.Find(); err != nil {
			code = fail(err)
		}
	}
	return code
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "stories:", err)
	return 1
}
