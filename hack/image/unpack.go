package main

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"slices"
)

// wanted are the files of the packages that are for the image: the programs,
// the loader, libraries and extensions, and what says whose they are and under
// which terms they may be used.
var wanted = []string{
	"usr/sbin/iptables*", "usr/sbin/ip6tables*", "usr/sbin/xtables-*-multi",
	"usr/lib/*/*.so*", "usr/lib/*/xtables/*.so", "usr/lib/*.so*", "usr/lib64/*.so*",
	"usr/share/doc/*/copyright", "usr/share/common-licenses/*",
	"var/lib/dpkg/status.d/*",
}

// unwanted would be wanted, but for a shell that they need.
var unwanted = []string{"usr/sbin/iptables-apply", "usr/sbin/ip6tables-apply"}

// merged are folders of the root that are links to their namesakes in usr, as
// on every Debian machine. Packages may have their files in either.
var merged = []string{"bin", "lib", "lib64", "sbin"}

// unpackIPTables puts iptables and ip6tables, both back ends of them, and the
// libraries that they need into root.
func unpackIPTables(ctx context.Context, root, arch string) error {
	for _, d := range merged {
		if err := os.MkdirAll(filepath.Join(root, "usr", d), 0o755); err != nil {
			return err
		}
		if err := os.Symlink("usr/"+d, filepath.Join(root, d)); err != nil {
			return err
		}
	}
	err := withPackages(ctx, arch, func(debs []string) error {
		for _, deb := range debs {
			if err := unpack(ctx, root, deb); err != nil {
				return fmt.Errorf("unpacking %s: %w", filepath.Base(deb), err)
			}
		}
		return nil
	})
	if err != nil {
		return err
	}
	if err := alternatives(root); err != nil {
		return err
	}
	return prune(root)
}

// unpack adds a package's files, and its description where those who look for
// software with known faults look for it.
func unpack(ctx context.Context, root, deb string) error {
	tar := exec.CommandContext(ctx, "tar", "-x", "--keep-directory-symlink", "-C", root)
	files := exec.CommandContext(ctx, "dpkg-deb", "--fsys-tarfile", deb)
	pipe, err := files.StdoutPipe()
	if err != nil {
		return err
	}
	files.Stderr, tar.Stderr, tar.Stdin = os.Stderr, os.Stderr, pipe
	if err := files.Start(); err != nil {
		return err
	}
	err = tar.Run()
	_ = pipe.Close() // it would wait for ever for a tar that has failed
	if werr := files.Wait(); err == nil {
		err = werr
	}
	if err != nil {
		return err
	}
	about, err := exec.CommandContext(ctx, "dpkg-deb", "--field", deb).Output()
	if err != nil {
		return err
	}
	name, err := exec.CommandContext(ctx, "dpkg-deb", "--show", "--showformat=${Package}", deb).Output()
	if err != nil {
		return err
	}
	status := filepath.Join(root, "var/lib/dpkg/status.d", string(name))
	if err := os.MkdirAll(filepath.Dir(status), 0o755); err != nil {
		return err
	}
	return os.WriteFile(status, about, 0o644)
}

// alternatives makes the names that the packages' scripts would have made.
func alternatives(root string) error {
	for _, family := range []string{"iptables", "ip6tables"} {
		for _, verb := range []string{"", "-save", "-restore"} {
			name := filepath.Join(root, "usr/sbin", family+verb)
			if _, err := os.Lstat(name); err == nil {
				continue
			}
			if err := os.Symlink(family+"-nft"+verb, name); err != nil {
				return err
			}
		}
	}
	return nil
}

// prune removes what is not wanted, and then folders with nothing in them.
func prune(root string) error {
	var folders []string
	err := filepath.WalkDir(root, func(file string, d fs.DirEntry, err error) error {
		if err != nil || file == root {
			return err
		}
		rel, err := filepath.Rel(root, file)
		if err != nil {
			return err
		}
		if d.IsDir() {
			folders = append(folders, file)
			return nil
		}
		if isWanted(rel, d.Type()) {
			return nil
		}
		return os.Remove(file)
	})
	if err != nil {
		return err
	}
	slices.Reverse(folders) // the inner ones first
	for _, f := range folders {
		// Fails for those with something in them, which stay.
		_ = os.Remove(f)
	}
	for _, d := range merged {
		link := filepath.Join(root, d)
		if _, err := os.Stat(link); errors.Is(err, fs.ErrNotExist) {
			if err := os.Remove(link); err != nil && !errors.Is(err, fs.ErrNotExist) {
				return err
			}
		}
	}
	return nil
}

// isWanted judges a file by its path from the root.
func isWanted(rel string, kind fs.FileMode) bool {
	if slices.Contains(unwanted, rel) {
		return false
	}
	if kind&fs.ModeSymlink != 0 {
		if slices.Contains(merged, rel) {
			return true
		}
		// One package's terms may be those of another.
		if ok, _ := path.Match("usr/share/doc/*", rel); ok {
			return true
		}
	}
	return slices.ContainsFunc(wanted, func(pattern string) bool {
		ok, _ := path.Match(pattern, rel)
		return ok
	})
}
