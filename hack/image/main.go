// Command image makes the container images without a container engine: one
// docker-archive per binary and architecture, as `ctr images import`, `docker
// load` and skopeo take it. Same sources and packages, same bytes.
//
// The agent's second layer holds iptables with its libraries, unpacked from the
// Debian packages, for mode iptables; the other modes need no program. The
// packages come by apt-get, so it takes a Debian machine to make that layer.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// options say what is made.
type options struct {
	version, out string
	archs, names []string // architectures and binaries
}

func main() {
	version := flag.String("version", "latest", "version put into binaries and tags")
	out := flag.String("o", "out", "folder for the archives")
	archs := flag.String("arch", "amd64,arm64", "architectures, separated by commas")
	names := flag.String("binary", "kasway-agent,kasway-server", "binaries, separated by commas")
	flag.Parse()
	o := options{version: *version, out: *out, archs: strings.Split(*archs, ","), names: strings.Split(*names, ",")}
	if err := run(context.Background(), o); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) error {
	if err := os.MkdirAll(o.out, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "kasway-image-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(work) }()
	for _, arch := range o.archs {
		for _, binary := range o.names {
			path := filepath.Join(o.out, binary+"_"+arch+".tar")
			size, err := build(ctx, filepath.Join(work, binary+"-"+arch), path, binary, arch, o.version)
			if err != nil {
				return fmt.Errorf("%s for %s: %w", binary, arch, err)
			}
			fmt.Printf("%-32s %5.1f MB  %s\n", path, float64(size)/1e6, strings.Join(tags(binary, o.version), " "))
		}
	}
	return nil
}

// build writes one archive and returns its size.
func build(ctx context.Context, work, path, binary, arch, version string) (int64, error) {
	root := filepath.Join(work, "binary")
	if err := compile(ctx, filepath.Join(root, binary), binary, arch, version); err != nil {
		return 0, err
	}
	if err := licences(ctx, root, binary, arch); err != nil {
		return 0, err
	}
	roots := []string{root}
	if binary == "kasway-agent" {
		tools := filepath.Join(work, "iptables")
		if err := unpackIPTables(ctx, tools, arch); err != nil {
			return 0, err
		}
		roots = append(roots, tools)
	}
	for _, r := range roots {
		if err := sameMachine(r, arch); err != nil {
			return 0, err
		}
	}
	img, err := assemble(roots, binary, arch)
	if err != nil {
		return 0, err
	}
	if err := writeArchive(path, img, tags(binary, version)); err != nil {
		return 0, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// tags are the names in the archive: the version, written as a tag may be, and
// the one that the manifests under deploy/ have.
func tags(binary, version string) []string {
	all := []string{binary + ":latest"}
	if t := strings.ReplaceAll(version, "+", "_"); t != "latest" {
		all = append(all, binary+":"+t)
	}
	return all
}

// source is the package that a binary is built from.
func source(binary string) string { return "./cmd/" + strings.TrimPrefix(binary, "kasway-") }

func compile(ctx context.Context, dst, binary, arch, version string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath",
		"-ldflags", "-s -w -X github.com/kasway/kasway/pkg/observe.Version="+version,
		"-o", dst, source(binary))
	cmd.Env = environment(arch)
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

func environment(arch string) []string {
	return append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
}
