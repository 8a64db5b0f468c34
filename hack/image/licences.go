package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// licences puts below root the licences of everything that is linked into a
// binary: Kasway's, Go's, and those of every module that it uses.
func licences(ctx context.Context, root, binary, arch string) error {
	to := filepath.Join(root, "usr/share/doc", binary)
	cmd := exec.CommandContext(ctx, "go", "list", "-deps",
		"-f", "{{with .Module}}{{.Path}} {{.Dir}}{{end}}", source(binary))
	cmd.Env, cmd.Stderr = environment(arch), os.Stderr
	out, err := cmd.Output()
	if err != nil {
		return err
	}
	from := map[string]string{}
	for line := range strings.Lines(string(out)) {
		if module, dir, ok := strings.Cut(strings.TrimSpace(line), " "); ok {
			from[module] = dir
		}
	}
	goroot, err := exec.CommandContext(ctx, "go", "env", "GOROOT").Output()
	if err != nil {
		return err
	}
	from["go"] = strings.TrimSpace(string(goroot))
	for module, dir := range from {
		if err := copyLicences(filepath.Join(to, module), dir); err != nil {
			return fmt.Errorf("licence of %s: %w", module, err)
		}
	}
	return nil
}

// copyLicences copies the files of a module's folder that tell its terms; there
// must be one.
func copyLicences(to, from string) error {
	var found []string
	for _, pattern := range []string{"LICEN[SC]E*", "COPYING*", "NOTICE*", "COPYRIGHT*", "PATENTS*"} {
		files, err := filepath.Glob(filepath.Join(from, pattern))
		if err != nil {
			return err
		}
		found = append(found, files...)
	}
	if len(found) == 0 {
		return fmt.Errorf("none is in %s", from)
	}
	if err := os.MkdirAll(to, 0o755); err != nil {
		return err
	}
	for _, f := range found {
		text, err := os.ReadFile(f)
		if err != nil {
			return err
		}
		if err := os.WriteFile(filepath.Join(to, filepath.Base(f)), text, 0o644); err != nil {
			return err
		}
	}
	return nil
}
