package deploy

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
)

// containerEnv holds, in a process that is to become a container, a spec.
const containerEnv = "KASWAY_CONTAINER"

// spec is a container as a runtime makes it from a pod's spec: namespaces for
// mounts and processes, the image as its root, and no more privileges than said.
type spec struct {
	// Root is the image; empty: the machine's own files.
	Root     string
	ReadOnly bool // the root
	Mounts   []bind
	// Capabilities are those that may be had at all ("NET_ADMIN"); with
	// Privileged, every one.
	Capabilities []string
	Privileged   bool
	// NoNewPrivileges is what allowPrivilegeEscalation: false means.
	NoNewPrivileges bool
	// Dir is where it starts; empty: /.
	Dir       string
	Argv, Env []string
}

// bind makes a path of the machine seen at another one of the container.
type bind struct {
	From, To string
	ReadOnly bool
}

// command is the process that becomes the container, on h.
func (s spec) command(h *netns.Host) (*netns.Cmd, error) {
	text, err := json.Marshal(s)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	c := h.Command(self)
	c.Env = []string{containerEnv + "=" + string(text)}
	c.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS | unix.CLONE_NEWPID | unix.CLONE_NEWIPC}
	return c, nil
}

// enter makes the calling process, alone in its namespaces, the container. It
// runs on the thread that exec keeps.
func enter(text string) error {
	var s spec
	if err := json.Unmarshal([]byte(text), &s); err != nil {
		return err
	}
	if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
		return fmt.Errorf("a mount namespace of its own: %w", err)
	}
	if s.Root != "" {
		if err := s.enterRoot(); err != nil {
			return err
		}
	} else if err := errors.Join(unix.Mount("proc", "/proc", "proc", 0, ""), s.bindAll("/")); err != nil {
		return err
	}
	if s.Dir != "" {
		if err := unix.Chdir(s.Dir); err != nil {
			return err
		}
	}
	if !s.Privileged {
		if err := drop(s.Capabilities); err != nil {
			return err
		}
	}
	if s.NoNewPrivileges {
		if err := unix.Prctl(unix.PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0); err != nil {
			return err
		}
	}
	return fmt.Errorf("%s: %w", s.Argv[0], unix.Exec(s.Argv[0], s.Argv, s.Env))
}

func (s spec) enterRoot() error {
	if err := unix.Mount(s.Root, s.Root, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mounting %s: %w", s.Root, err)
	}
	if err := errors.Join(s.system(), s.bindAll(s.Root)); err != nil {
		return err
	}
	if s.ReadOnly {
		if err := unix.Mount("", s.Root, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
			return fmt.Errorf("making the root read-only: %w", err)
		}
	}
	if err := unix.Chdir(s.Root); err != nil {
		return err
	}
	if err := unix.PivotRoot(".", "."); err != nil {
		return fmt.Errorf("pivot_root: %w", err)
	}
	return errors.Join(unix.Unmount(".", unix.MNT_DETACH), unix.Chdir("/"))
}

// system mounts what every container has: its own /proc, of which what belongs
// to the machine cannot be written, /sys without writing, and a few devices.
func (s spec) system() error {
	const noexec = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC
	for _, m := range []struct {
		at, kind string
		flags    uintptr
	}{{"proc", "proc", noexec}, {"sys", "sysfs", noexec | unix.MS_RDONLY}, {"dev", "tmpfs", unix.MS_NOSUID}} {
		at := filepath.Join(s.Root, m.at)
		if err := errors.Join(os.MkdirAll(at, 0o755), unix.Mount(m.kind, at, m.kind, m.flags, "")); err != nil {
			return fmt.Errorf("mounting /%s: %w", m.at, err)
		}
	}
	for _, p := range []string{"bus", "fs", "irq", "sys", "sysrq-trigger"} {
		if _, err := os.Stat("/proc/" + p); errors.Is(err, fs.ErrNotExist) {
			continue // not on every kernel
		}
		if err := (bind{"/proc/" + p, "/proc/" + p, true}).mount(s.Root); err != nil {
			return err
		}
	}
	for _, d := range []string{"null", "zero", "full", "random", "urandom"} {
		if err := (bind{"/dev/" + d, "/dev/" + d, false}).mount(s.Root); err != nil {
			return err
		}
	}
	return nil
}

func (s spec) bindAll(root string) error {
	for _, b := range s.Mounts {
		if err := b.mount(root); err != nil {
			return err
		}
	}
	return nil
}

// mount makes the place if it is not there: in the container's folder, not on
// the machine.
func (b bind) mount(root string) error {
	to := filepath.Join(root, b.To)
	if b.From == b.To && root != "/" && strings.HasPrefix(b.To, "/proc/") {
		b.From = to // the container's own, made read-only
	}
	info, err := os.Stat(b.From)
	if err != nil {
		return err
	}
	if info.IsDir() {
		err = os.MkdirAll(to, 0o755)
	} else if _, serr := os.Stat(to); serr != nil {
		err = errors.Join(os.MkdirAll(filepath.Dir(to), 0o755), os.WriteFile(to, nil, 0o644))
	}
	if err != nil {
		return err
	}
	if err := unix.Mount(b.From, to, "", unix.MS_BIND, ""); err != nil {
		return fmt.Errorf("mounting %s at %s: %w", b.From, b.To, err)
	}
	if !b.ReadOnly {
		return nil
	}
	if err := unix.Mount("", to, "", unix.MS_REMOUNT|unix.MS_BIND|unix.MS_RDONLY, ""); err != nil {
		return fmt.Errorf("making %s read-only: %w", b.To, err)
	}
	return nil
}

// capabilities are those that are named in manifests and the unit.
var capabilities = map[string]int{
	"BPF":       unix.CAP_BPF,
	"NET_ADMIN": unix.CAP_NET_ADMIN, "NET_RAW": unix.CAP_NET_RAW, "NET_BIND_SERVICE": unix.CAP_NET_BIND_SERVICE,
}

// drop takes every capability but those kept from the calling thread, also from
// what it will be able to gain.
func drop(kept []string) error {
	var keep []int
	for _, k := range kept {
		c, ok := capabilities[k]
		if !ok {
			return fmt.Errorf("capability %q is not known here", k)
		}
		keep = append(keep, c)
	}
	var set [2]unix.CapUserData
	for _, c := range keep {
		set[c/32].Permitted |= 1 << (c % 32)
		set[c/32].Effective |= 1 << (c % 32)
	}
	for c := 0; c <= unix.CAP_LAST_CAP; c++ {
		if slices.Contains(keep, c) {
			continue
		}
		// EINVAL: this kernel has no such capability.
		if err := unix.Prctl(unix.PR_CAPBSET_DROP, uintptr(c), 0, 0, 0); err != nil && !errors.Is(err, unix.EINVAL) {
			return fmt.Errorf("dropping capability %d: %w", c, err)
		}
	}
	if err := unix.Capset(&unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, &set[0]); err != nil {
		return fmt.Errorf("keeping %v: %w", kept, err)
	}
	return nil
}
