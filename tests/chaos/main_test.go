//go:build chaos

package chaos

import (
	"fmt"
	"os"
	"testing"

	"github.com/kasway/kasway/tests/netns/stack"
)

// bin is where the binaries are, built from this tree.
var bin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	var err error
	if bin, err = os.MkdirTemp("", "kasway-chaos-"); err == nil {
		defer func() { _ = os.RemoveAll(bin) }()
		err = stack.Build(bin, false)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return m.Run()
}
