// Command image makes the container images without a container engine: one
// docker-archive per binary and architecture, as `ctr images import`, `docker
// load` and skopeo take it. Same sources and packages, same bytes.
//
// The agent's second layer holds iptables with its libraries, unpacked from the
// Debian packages, for mode iptables; the other modes need no program.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

func main() {
	version := flag.String("version", "latest", "version put into binaries and tags")
	out := flag.String("o", "out", "folder for the archives")
	archs := flag.String("arch", "amd64,arm64", "architectures, separated by commas")
	flag.Parse()
	if err := run(context.Background(), *out, *version, strings.Split(*archs, ",")); err != nil {
		fmt.Fprintln(os.Stderr, "image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out, version string, archs []string) error {
	if err := os.MkdirAll(out, 0o755); err != nil {
		return err
	}
	work, err := os.MkdirTemp("", "kasway-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(work)
	for _, arch := range archs {
		for _, binary := range []string{"kasway-agent", "kasway-server"} {
			path := filepath.Join(out, binary+"_"+arch+".tar")
			size, err := build(ctx, work, path, binary, arch, version)
			if err != nil {
				return fmt.Errorf("%s for %s: %w", binary, arch, err)
			}
			fmt.Printf("%-32s %5.1f MB  %s:%s\n", path, float64(size)/1e6, binary, tag(version))
		}
	}
	return nil
}

// build writes one archive and returns its size.
func build(ctx context.Context, work, path, binary, arch, version string) (int64, error) {
	root := filepath.Join(work, binary+"-"+arch)
	if err := compile(ctx, filepath.Join(root, binary), binary, arch, version); err != nil {
		return 0, err
	}
	roots := []string{root}
	if binary == "kasway-agent" {
		tools := filepath.Join(work, "iptables-"+arch)
		if err := unpackIPTables(ctx, tools, arch); err != nil {
			return 0, err
		}
		roots = append(roots, tools)
	}
	img, err := assemble(roots, binary, arch)
	if err != nil {
		return 0, err
	}
	ref, err := name.NewTag(binary+":"+tag(version), name.WithDefaultRegistry(""))
	if err != nil {
		return 0, err
	}
	if err := tarball.WriteToFile(path, ref, img); err != nil {
		return 0, err
	}
	info, err := os.Stat(path)
	if err != nil {
		return 0, err
	}
	return info.Size(), nil
}

// tag is the version as an image tag may be written.
func tag(version string) string { return strings.ReplaceAll(version, "+", "_") }

func compile(ctx context.Context, dst, binary, arch, version string) error {
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath",
		"-ldflags", "-s -w -X github.com/kasway/kasway/pkg/observe.Version="+version,
		"-o", dst, "./cmd/"+strings.TrimPrefix(binary, "kasway-"))
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOOS=linux", "GOARCH="+arch)
	cmd.Stderr = os.Stderr
	return cmd.Run()
}

// assemble makes an image with one layer per root.
func assemble(roots []string, binary, arch string) (v1.Image, error) {
	img := empty.Image
	for _, root := range roots {
		layer, err := layerOf(root)
		if err != nil {
			return nil, err
		}
		if img, err = mutate.AppendLayers(img, layer); err != nil {
			return nil, err
		}
	}
	file, err := img.ConfigFile()
	if err != nil {
		return nil, err
	}
	file = file.DeepCopy()
	file.OS, file.Architecture = "linux", arch
	file.Config = v1.Config{
		Entrypoint: []string{"/" + binary},
		Cmd:        []string{"run"},
		Env:        []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"},
		Labels: map[string]string{
			"org.opencontainers.image.title":    binary,
			"org.opencontainers.image.licenses": "Apache-2.0",
			"org.opencontainers.image.source":   "https://github.com/kasway/kasway",
		},
	}
	return mutate.ConfigFile(img, file)
}
