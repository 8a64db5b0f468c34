package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strconv"
	"strings"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
)

// Remedies of what a preflight may find.
const (
	remedyCaps = "run the agent as root, or with CAP_BPF and CAP_NET_ADMIN (before Linux 5.8: CAP_SYS_ADMIN) in the initial user namespace"
	remedyOld  = "use Linux 5.8 or newer with CONFIG_CGROUP_BPF, or another mode"
	remedyGone = "look for what else is attached there (bpftool cgroup tree), and whether lo is up"
)

// preflight is what is asked before anything is attached; tests answer instead
// of the machine.
type preflight struct {
	setting, pinDir string
	sys             system
	capable         func(c int) bool
	// try loads the programs, attaches them to the cgroup, has a process there
	// connect and looks where that arrives. It returns what is worth a note.
	try func(ctx context.Context, cgroup string) (notes []string, err error)
	// netNS says whether the network namespace is that of process 1.
	netNS   func() (bool, error)
	release string
	// controllers is the text of /proc/cgroups.
	controllers func() (string, error)
}

// run asks from the cheapest to the dearest; the first that is unmet ends it.
func (p preflight) run(ctx context.Context) intercept.Report {
	if err := ctx.Err(); err != nil {
		return intercept.Report{Err: err}
	}
	if err := p.privileged(); err != nil {
		return refusal(err)
	}
	root, err := p.sys.findRoot(p.setting)
	if err != nil {
		return refusal(err)
	}
	pins, err := p.sys.findBPFFS(p.pinDir, p.capable(unix.CAP_SYS_ADMIN))
	if err != nil {
		return refusal(err)
	}
	tried, err := p.try(ctx, root.Path)
	if err != nil {
		return refusal(err)
	}
	return intercept.Report{Notes: append(p.notes(root, pins), tried...)}
}

// privileged names the capability that is missing: the kernel's EPERM does not.
func (p preflight) privileged() error {
	var missing []string
	for _, c := range []struct {
		number int
		what   string
	}{
		{unix.CAP_BPF, "CAP_BPF (to load programs)"},
		{unix.CAP_NET_ADMIN, "CAP_NET_ADMIN (to attach them, and to mark the agent's own sockets)"},
	} {
		// CAP_SYS_ADMIN holds what CAP_BPF was split from.
		if !p.capable(c.number) && (c.number != unix.CAP_BPF || !p.capable(unix.CAP_SYS_ADMIN)) {
			missing = append(missing, c.what)
		}
	}
	if len(missing) == 0 {
		return nil
	}
	return fmt.Errorf("%w: %s", intercept.ErrPrivilege, strings.Join(missing, " and "))
}

// notes are worth knowing though the mode can work.
func (p preflight) notes(root Root, pins BPFFS) (notes []string) {
	notes = append(notes, "attaches to "+root.String())
	if pins.Missing {
		notes = append(notes, "a bpffs will be mounted at "+pins.Point)
	}
	if pins.Note != "" {
		notes = append(notes, pins.Note)
	}
	if same, err := p.netNS(); err == nil && !same {
		notes = append(notes, "the network namespace is not that of process 1: on a node the agent needs hostNetwork, or it takes every process of the node for a pod's")
	}
	if used := p.classifiers(); root.True && len(used) > 0 && olderThan(p.release, 5, 15) {
		notes = append(notes, fmt.Sprintf("%s of cgroup 1 in use: before Linux 5.15 a socket of a process there is in no cgroup of version 2 and is not diverted", strings.Join(used, " and ")))
	}
	return notes
}

// classifiers are those of net_cls and net_prio that have a hierarchy with more
// than its root.
func (p preflight) classifiers() (used []string) {
	text, err := p.controllers()
	if err != nil {
		return nil // without cgroup 1 there is no such file
	}
	for line := range strings.Lines(text) {
		// net_cls	2	7	1: name, hierarchy, cgroups, enabled
		f := strings.Fields(line)
		if len(f) == 4 && (f[0] == "net_cls" || f[0] == "net_prio") && f[1] != "0" && f[2] != "1" {
			used = append(used, f[0])
		}
	}
	return used
}

// olderThan compares a kernel's release, such as "5.10.0-28-amd64". Distributors
// bring features to older ones, so nothing but a note may depend on it.
func olderThan(release string, major, minor int) bool {
	f := strings.FieldsFunc(release, func(r rune) bool { return r < '0' || r > '9' })
	if len(f) < 2 {
		return false
	}
	a, errA := strconv.Atoi(f[0])
	b, errB := strconv.Atoi(f[1])
	return errA == nil && errB == nil && (a < major || a == major && b < minor)
}

// refusal makes a Report of an error: what cannot be, what may not be, and what
// could not be found out.
func refusal(err error) intercept.Report {
	var u *unmet
	var verifier *ebpf.VerifierError
	switch {
	case err == nil:
		return intercept.Report{}
	case errors.As(err, &u):
		return intercept.Report{Err: u.err, Remedy: u.remedy}
	case errors.Is(err, intercept.ErrPrivilege):
		return intercept.Report{Err: err, Remedy: remedyCaps}
	case errors.Is(err, intercept.ErrNotSupported):
		return intercept.Report{Err: err, Remedy: remedyOld}
	case errors.Is(err, ebpf.ErrNotSupported):
		return intercept.Report{Err: alsoNotSupported{err}, Remedy: remedyOld}
	case errors.Is(err, unix.EPERM):
		return intercept.Report{Err: fmt.Errorf("%w: %w", intercept.ErrPrivilege, err), Remedy: remedyCaps}
	case errors.Is(err, unix.EINVAL), errors.Is(err, unix.ENOSYS), errors.As(err, &verifier): // whose errno may be EACCES
		return intercept.NotSupported(remedyOld, "%v", err)
	case errors.Is(err, fs.ErrPermission):
		return intercept.Report{Err: fmt.Errorf("%w: %w", intercept.ErrPrivilege, err), Remedy: remedyCaps}
	}
	return intercept.Report{Err: err, Remedy: remedyGone}
}

// alsoNotSupported is an error that says so already in its text.
type alsoNotSupported struct{ err error }

func (e alsoNotSupported) Error() string   { return e.err.Error() }
func (e alsoNotSupported) Unwrap() []error { return []error{intercept.ErrNotSupported, e.err} }

func controllers() (string, error) {
	b, err := os.ReadFile("/proc/cgroups")
	return string(b), err
}

func release() string {
	var u unix.Utsname
	if err := unix.Uname(&u); err != nil {
		return ""
	}
	return unix.ByteSliceToString(u.Release[:])
}
