package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// freshFor is how long packages are used before the mirror is asked for newer
// ones; removing the cache's folder asks at once.
const freshFor = 24 * time.Hour

// withPackages hands f the Debian packages of arch: iptables, all that it needs,
// and base-files, which has the texts of the licences. They are kept in the
// user's cache; who comes second waits until f has returned.
func withPackages(ctx context.Context, arch string, f func(debs []string) error) error {
	cache, err := os.UserCacheDir()
	if err != nil {
		return err
	}
	cache = filepath.Join(cache, "kasway-image")
	if err := os.MkdirAll(cache, 0o755); err != nil {
		return err
	}
	lock, err := os.OpenFile(filepath.Join(cache, arch+".lock"), os.O_CREATE|os.O_RDWR, 0o644)
	if err != nil {
		return err
	}
	defer lock.Close()
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX); err != nil {
		return err
	}
	kept := filepath.Join(cache, arch)
	if err := refresh(ctx, kept, arch); err != nil {
		return err
	}
	debs, err := filepath.Glob(kept + "/*.deb")
	if err != nil {
		return err
	}
	return f(debs)
}

// refresh fills kept if it is not there or old. Old packages are used, and it is
// said, if there is no way to newer ones.
func refresh(ctx context.Context, kept, arch string) error {
	info, err := os.Stat(kept)
	if err == nil && time.Since(info.ModTime()) < freshFor {
		return nil
	}
	there := err == nil
	state, err := os.MkdirTemp(filepath.Dir(kept), arch+"-")
	if err != nil {
		return err
	}
	defer func() { _ = os.RemoveAll(state) }()
	if err := download(ctx, state, arch); err != nil {
		if !there {
			return err
		}
		fmt.Fprintf(os.Stderr, "image: packages of %s are used: %v\n", info.ModTime().Format(time.DateOnly), err)
		return nil
	}
	return errors.Join(os.RemoveAll(kept), os.Rename(filepath.Join(state, "archives"), kept))
}

// aptConfig clears what the machine does after an update, for its own sake.
const aptConfig = `#clear APT::Update;
#clear DPkg::Post-Invoke;
#clear Acquire::IndexTargets::deb::DEP-11;
Acquire::Languages "none";
Acquire::Retries "3";
APT::Install-Recommends "false";
APT::Sandbox::User "root";
Debug::NoLocking "true";
`

// download puts the packages into state/archives. apt keeps its state in this
// folder: the machine's is left alone, and what the machine has installed does
// not count. Where the packages come from is the machine's setting.
func download(ctx context.Context, state, arch string) error {
	archives := filepath.Join(state, "archives")
	for _, d := range []string{state + "/lists/partial", archives + "/partial"} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	for file, text := range map[string]string{"status": "", "apt.conf": aptConfig} {
		if err := os.WriteFile(filepath.Join(state, file), []byte(text), 0o644); err != nil {
			return err
		}
	}
	apt := func(args ...string) error {
		cmd := exec.CommandContext(ctx, "apt-get", append([]string{
			"-qq", "-c", state + "/apt.conf",
			"-o", "APT::Architecture=" + arch, "-o", "APT::Architectures=" + arch, "-o", "APT::Architectures::=" + arch,
			"-o", "Dir::State=" + state, "-o", "Dir::State::lists=" + state + "/lists", "-o", "Dir::State::status=" + state + "/status",
			"-o", "Dir::Cache=" + state, "-o", "Dir::Cache::archives=" + archives,
		}, args...)...)
		cmd.Dir = archives // where "download" puts things
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("apt-get %s: %w\n%s", strings.Join(args, " "), err, out)
		}
		return nil
	}
	for _, args := range [][]string{{"update"}, {"install", "--download-only", "-y", "iptables"}, {"download", "base-files"}} {
		if err := apt(args...); err != nil {
			return err
		}
	}
	return os.RemoveAll(archives + "/partial")
}
