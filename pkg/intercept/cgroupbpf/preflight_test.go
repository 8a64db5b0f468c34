package cgroupbpf

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
)

// can is a process with these capabilities.
func can(caps ...int) func(int) bool {
	return func(c int) bool { return slices.Contains(caps, c) }
}

// willing is a preflight to which everything answers that all is well.
func willing() preflight {
	return preflight{
		setting: Auto,
		sys: machine{
			own:  unified + "50 20 0:40 / /sys/fs/bpf rw shared:3 - bpf bpf rw,mode=700\n",
			dirs: map[string]directory{"/sys/fs/cgroup": whole},
		}.system(),
		capable: can(unix.CAP_BPF, unix.CAP_NET_ADMIN),
		try:     func(context.Context, string) ([]string, error) { return []string{"tried"}, nil },
		netNS:   func() (bool, error) { return true, nil }, release: "6.1.0-28-amd64",
		controllers: func() (string, error) { return "", fs.ErrNotExist },
	}
}

// The three answers are told apart, and each has its remedy.
func TestPreflightReport(t *testing.T) {
	const (
		fine = iota
		notSupported
		privilege
		inconclusive
	)
	failing := func(err error) func(*preflight) {
		return func(p *preflight) { p.try = func(context.Context, string) ([]string, error) { return nil, err } }
	}
	for name, c := range map[string]struct {
		but  func(*preflight)
		want int
		says []string // of error and remedy
		not  string
	}{
		"all is well":           {but: func(*preflight) {}, want: fine},
		"CAP_SYS_ADMIN alone":   {func(p *preflight) { p.capable = can(unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN) }, fine, nil, ""},
		"without CAP_BPF":       {func(p *preflight) { p.capable = can(unix.CAP_NET_ADMIN) }, privilege, []string{"CAP_BPF (to load programs)", "run the agent as root"}, "CAP_NET_ADMIN (to"},
		"without CAP_NET_ADMIN": {func(p *preflight) { p.capable = can(unix.CAP_BPF) }, privilege, []string{"CAP_NET_ADMIN (to attach"}, "CAP_BPF (to"},
		"without any":           {func(p *preflight) { p.capable = can() }, privilege, []string{"CAP_BPF (to load programs) and CAP_NET_ADMIN (to attach"}, ""},
		"no root in sight": {func(p *preflight) {
			p.sys = machine{own: namespaced, dirs: map[string]directory{"/sys/fs/cgroup": part}}.system()
		}, notSupported, []string{"only a part", "hostPath"}, ""},
		"no bpffs": {func(p *preflight) {
			p.sys = machine{own: unified, dirs: map[string]directory{"/sys/fs/cgroup": whole}}.system()
		}, notSupported, []string{"no bpffs", "mount -t bpf"}, ""},
		"no table of mounts":       {func(p *preflight) { p.sys = machine{own: "x"}.system() }, inconclusive, []string{"mount table"}, ""},
		"no such program type":     {failing(fmt.Errorf("loading: %w", ebpf.ErrNotSupported)), notSupported, []string{"Linux 5.8"}, ""},
		"no such attach type":      {failing(fmt.Errorf("attaching: %w", unix.EINVAL)), notSupported, []string{"attaching", "CONFIG_CGROUP_BPF"}, ""},
		"the verifier says no":     {failing(fmt.Errorf("loading: %w", &ebpf.VerifierError{Cause: unix.EACCES, Log: []string{"R1 invalid"}})), notSupported, []string{"R1 invalid"}, ""},
		"the kernel says may not":  {failing(fmt.Errorf("loading: %w", unix.EPERM)), privilege, []string{"loading", "initial user namespace"}, ""},
		"the connect is not seen":  {failing(errors.New("it was not diverted")), inconclusive, []string{"bpftool cgroup tree"}, ""},
		"it has been told to stop": {func(p *preflight) { p.try = nil }, inconclusive, nil, ""},
	} {
		t.Run(name, func(t *testing.T) {
			p := willing()
			c.but(&p)
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			if p.try == nil {
				cancel()
			}
			r := p.run(ctx)
			got := inconclusive
			switch {
			case r.Err == nil:
				got = fine
			case errors.Is(r.Err, intercept.ErrPrivilege):
				got = privilege
			case errors.Is(r.Err, intercept.ErrNotSupported):
				got = notSupported
			}
			if got != c.want {
				t.Fatalf("answer %d (%v), want %d", got, r.Err, c.want)
			}
			if r.Err == nil {
				return
			}
			text := r.Err.Error() + "\n" + r.Remedy
			for _, says := range c.says {
				if !strings.Contains(text, says) {
					t.Errorf("%q is not said in:\n%s", says, text)
				}
			}
			if c.not != "" && strings.Contains(text, c.not) {
				t.Errorf("%q is said in:\n%s", c.not, text)
			}
			for _, twice := range []error{intercept.ErrPrivilege, intercept.ErrNotSupported} {
				if strings.Count(text, twice.Error()) > 1 {
					t.Errorf("%q is said twice: %s", twice, text)
				}
			}
		})
	}
}

func TestPreflightNotes(t *testing.T) {
	const used = "#subsys_name\thierarchy\tnum_cgroups\tenabled\ncpu\t3\t9\t1\nnet_cls\t2\t7\t1\nnet_prio\t0\t1\t1\n"
	for name, c := range map[string]struct {
		but  func(*preflight)
		want []string
	}{
		"nothing":        {func(*preflight) {}, nil},
		"not the host's": {func(p *preflight) { p.netNS = func() (bool, error) { return false, nil } }, []string{"needs hostNetwork"}},
		"cannot be told": {func(p *preflight) { p.netNS = func() (bool, error) { return false, fs.ErrPermission } }, nil},
		"classified, old": {func(p *preflight) {
			p.release, p.controllers = "5.10.0-28", func() (string, error) { return used, nil }
		}, []string{"net_cls of cgroup 1 in use"}},
		"classified, newer": {func(p *preflight) { p.controllers = func() (string, error) { return used, nil } }, nil},
		"bpffs to be mounted": {func(p *preflight) {
			p.sys = machine{own: unified, dirs: map[string]directory{"/sys/fs/cgroup": whole}}.system()
			p.capable = can(unix.CAP_SYS_ADMIN, unix.CAP_NET_ADMIN)
		}, []string{"a bpffs will be mounted at /sys/fs/bpf"}},
		"not the root": {func(p *preflight) {
			p.setting = "/sys/fs/cgroup/node"
			p.sys = machine{own: unified + "50 20 0:40 / /sys/fs/bpf rw - bpf bpf rw\n", dirs: map[string]directory{"/sys/fs/cgroup/node": part}}.system()
		}, nil},
	} {
		p := willing()
		c.but(&p)
		r := p.run(t.Context())
		if r.Err != nil {
			t.Errorf("%s: %v", name, r.Err)
			continue
		}
		first := "attaches to /sys/fs/cgroup (id 1, the root of all cgroups)"
		if p.setting != Auto {
			first = "attaches to /sys/fs/cgroup/node (id 120, not the root: only what runs below it is diverted)"
		}
		want := append(append([]string{first}, c.want...), "tried")
		if len(r.Notes) != len(want) {
			t.Errorf("%s: %q, want %q", name, r.Notes, want)
			continue
		}
		for i := range want {
			if !strings.Contains(r.Notes[i], want[i]) {
				t.Errorf("%s: %q, want %q", name, r.Notes[i], want[i])
			}
		}
	}
}

func TestOlderThan(t *testing.T) {
	for release, want := range map[string]bool{
		"5.14.9": true, "5.15.0": false, "4.19.0-27-amd64": true, "6.1": false, "10.2.1": false, "": false, "strange": false, "5": false,
	} {
		if got := olderThan(release, 5, 15); got != want {
			t.Errorf("%q: %t", release, got)
		}
	}
}
