package main

import (
	"bytes"
	"debug/elf"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
)

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

// machines are the architectures that images are made for.
var machines = map[string]elf.Machine{"amd64": elf.EM_X86_64, "arm64": elf.EM_AARCH64}

// sameMachine fails unless every program and library below root is for arch,
// and there is at least one: a package of another architecture unpacks as well.
func sameMachine(root, arch string) error {
	want, ok := machines[arch]
	if !ok {
		return fmt.Errorf("no image is made for architecture %q", arch)
	}
	n := 0
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		content, err := os.ReadFile(path)
		if err != nil || !bytes.HasPrefix(content, []byte(elf.ELFMAG)) {
			return err
		}
		f, err := elf.NewFile(bytes.NewReader(content))
		if err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
		if n++; f.Machine != want {
			return fmt.Errorf("%s is for %s, not for %s", path, f.Machine, arch)
		}
		return nil
	})
	if err == nil && n == 0 {
		return fmt.Errorf("no program is in %s", root)
	}
	return err
}
