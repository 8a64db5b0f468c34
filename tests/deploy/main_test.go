package deploy

import (
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"github.com/kasway/kasway/tests/netns/stack"
)

// repository is the folder that everything here is read from.
const repository = "../.."

// made is what tests share; each is made by the first that needs it.
var made struct {
	dir string
	bin func() (string, error)
	// images are the roots of the images by binary.
	images map[string]func() (imageRoot, error)
}

// init keeps the first thread: what becomes a container changes it.
func init() { runtime.LockOSThread() }

func TestMain(m *testing.M) {
	if spec, ok := os.LookupEnv(containerEnv); ok {
		// Returns only if it fails.
		fmt.Fprintln(os.Stderr, "container:", enter(spec))
		os.Exit(126)
	}
	flag.Parse()
	os.Exit(run(m))
}

func run(m *testing.M) int {
	var err error
	if made.dir, err = os.MkdirTemp("", "kasway-deploy-"); err != nil {
		return fail(err)
	}
	defer func() { _ = os.RemoveAll(made.dir) }()
	made.bin = sync.OnceValues(func() (string, error) {
		bin := filepath.Join(made.dir, "bin")
		return bin, stack.Build(bin, false)
	})
	made.images = map[string]func() (imageRoot, error){}
	for _, binary := range []string{"kasway-agent", "kasway-server"} {
		made.images[binary] = sync.OnceValues(func() (imageRoot, error) {
			return makeImage(filepath.Join(made.dir, "images"), binary)
		})
	}
	code := m.Run()
	if code == 0 {
		if err := goleak.Find(); err != nil {
			return fail(err)
		}
	}
	return code
}

func fail(err error) int {
	fmt.Fprintln(os.Stderr, "deploy:", err)
	return 1
}

// goTool runs the go command in the repository.
func goTool(args ...string) (string, error) {
	cmd := exec.Command("go", args...)
	cmd.Dir = repository
	var stderr strings.Builder
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", cmd, err, stderr.String())
	}
	return string(out), nil
}

func read(t *testing.T, path ...string) []byte {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(append([]string{repository}, path...)...))
	if err != nil {
		t.Fatal(err)
	}
	return text
}
