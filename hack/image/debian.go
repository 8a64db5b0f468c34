package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// unwanted are folders of the packages that nothing in the image reads. What
// says whose the software is (usr/share/doc) stays.
var unwanted = []string{
	"etc", "var", "lib/systemd", "usr/lib/systemd", "usr/lib/x86_64-linux-gnu/gconv", "usr/lib/aarch64-linux-gnu/gconv",
	"usr/share/info", "usr/share/lintian", "usr/share/locale", "usr/share/man", "usr/share/gcc", "usr/share/gdb",
}

// unpackIPTables puts iptables, ip6tables (both back ends) and the libraries
// they need into root, from Debian's packages of arch. apt keeps its state in a
// folder of its own: the machine's is left alone, and what the machine has
// installed does not count.
func unpackIPTables(ctx context.Context, root, arch string) error {
	state := root + ".apt"
	for _, d := range []string{root, state + "/lists/partial", state + "/archives/partial"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	defer os.RemoveAll(state)
	if err := os.WriteFile(state+"/status", nil, 0o644); err != nil {
		return err
	}
	apt := func(args ...string) error {
		options := []string{
			"-qq",
			"-o", "APT::Architecture=" + arch, "-o", "APT::Architectures::=" + arch, "-o", "APT::Architectures=" + arch,
			"-o", "Dir::State=" + state, "-o", "Dir::State::lists=" + state + "/lists", "-o", "Dir::State::status=" + state + "/status",
			"-o", "Dir::Cache=" + state, "-o", "Dir::Cache::archives=" + state + "/archives",
			"-o", "Debug::NoLocking=true", "-o", "APT::Sandbox::User=root", "-o", "APT::Install-Recommends=false",
		}
		cmd := exec.CommandContext(ctx, "apt-get", append(options, args...)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	if err := apt("update"); err != nil {
		return err
	}
	if err := apt("install", "--download-only", "-y", "iptables"); err != nil {
		return err
	}
	packages, err := filepath.Glob(state + "/archives/*.deb")
	if err != nil || len(packages) == 0 {
		return fmt.Errorf("apt-get brought no package for %s", arch)
	}
	for _, p := range packages {
		if out, err := exec.CommandContext(ctx, "dpkg-deb", "-x", p, root).CombinedOutput(); err != nil {
			return fmt.Errorf("dpkg-deb -x %s: %w\n%s", filepath.Base(p), err, out)
		}
	}
	for _, d := range unwanted {
		if err := os.RemoveAll(filepath.Join(root, d)); err != nil {
			return err
		}
	}
	return alternatives(root)
}

// alternatives makes the names that the packages' scripts would have made.
func alternatives(root string) error {
	for _, n := range []string{"iptables", "iptables-save", "iptables-restore", "ip6tables", "ip6tables-save", "ip6tables-restore"} {
		family, verb, _ := strings.Cut(n, "-")
		target := family + "-nft"
		if verb != "" {
			target += "-" + verb
		}
		path := filepath.Join(root, "usr/sbin", n)
		if _, err := os.Lstat(path); err == nil {
			continue
		}
		if err := os.Symlink(target, path); err != nil {
			return err
		}
	}
	return nil
}
