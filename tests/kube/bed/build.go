package bed

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// Build makes what runs in a bed, or finds it: hyperkube in its cache, box, and
// Kasway's own binaries from this tree. KASWAY_BIN names a folder whose
// kasway-agent and kasway-server are taken instead. The working directory is in
// this module, and the caller holds the Lock.
func Build(ctx context.Context) (Binaries, error) {
	root, err := run(ctx, "go", "list", "-m", "-f", "{{.Dir}}")
	if err != nil {
		return Binaries{}, err
	}
	root = strings.TrimSpace(root)
	cmd := exec.CommandContext(ctx, filepath.Join(root, "tests/kube/build.sh"))
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return Binaries{}, fmt.Errorf("building hyperkube: %w", err)
	}
	hyperkube := strings.TrimSpace(string(out))
	bin := filepath.Join(filepath.Dir(hyperkube), "bin")
	made := Binaries{Hyperkube: hyperkube, Agent: bin + "/kasway-agent", Server: bin + "/kasway-server", Box: bin + "/box",
		Deploy: filepath.Join(root, "deploy")}
	what := map[string]string{made.Box: "./tests/kube/box"}
	if given := os.Getenv("KASWAY_BIN"); given != "" {
		made.Agent, made.Server = filepath.Join(given, "kasway-agent"), filepath.Join(given, "kasway-server")
	} else {
		what[made.Agent], what[made.Server] = "./cmd/agent", "./cmd/server"
	}
	for to, pkg := range what {
		cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-buildvcs=false", "-o", to, pkg)
		cmd.Dir = root
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // pods have no C library
		if out, err := cmd.CombinedOutput(); err != nil {
			return Binaries{}, fmt.Errorf("building %s: %w: %s", pkg, err, out)
		}
	}
	return made, nil
}
