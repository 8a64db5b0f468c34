package cgroupbpf

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/kasway/kasway/pkg/intercept"
)

// whole is the true root, and part any other living cgroup.
var (
	whole = directory{cgroup2: true, inode: 1}
	part  = directory{cgroup2: true, inode: 120, child: true}
)

// machine answers as one with these mount tables and directories does.
type machine struct {
	own, init string // init "": process 1 is in the same mount namespace
	initErr   error
	dirs      map[string]directory
}

func (m machine) system() system {
	read := func(name string) (io.ReadCloser, error) {
		switch {
		case name == ownMounts, m.init == "" && m.initErr == nil:
			return io.NopCloser(strings.NewReader(m.own)), nil
		case m.initErr != nil:
			return nil, m.initErr
		}
		return io.NopCloser(strings.NewReader(m.init)), nil
	}
	return system{
		open: read,
		look: func(path string) (directory, error) {
			if d, ok := m.dirs[path]; ok {
				return d, nil
			}
			return directory{}, &fs.PathError{Op: "statfs", Path: path, Err: fs.ErrNotExist}
		},
	}
}

// Lines of mount tables, as kernels write them.
const (
	unified  = "30 23 0:26 / /sys/fs/cgroup rw,nosuid,nodev,noexec,relatime shared:9 - cgroup2 cgroup2 rw,nsdelegate,memory_recursiveprot\n"
	hybridV1 = "31 23 0:28 / /sys/fs/cgroup ro,nosuid,nodev,noexec shared:9 - tmpfs tmpfs ro,mode=755\n" +
		"32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime shared:10 - cgroup cgroup rw,cpu\n"
	hybrid  = hybridV1 + "41 31 0:38 / /sys/fs/cgroup/unified rw,relatime shared:11 - cgroup2 cgroup2 rw\n"
	hostDir = "812 790 0:26 / /host/sys/fs/cgroup ro,relatime master:9 - cgroup2 cgroup2 rw\n"
	// What a container with a cgroup namespace of its own has, and one without.
	namespaced = "790 780 0:26 / /sys/fs/cgroup ro,nosuid,nodev,noexec,relatime - cgroup2 cgroup rw\n"
	bound      = "790 780 0:26 /kubepods/pod1/c1 /sys/fs/cgroup ro,relatime - cgroup2 cgroup rw\n"
)

func TestFindRoot(t *testing.T) {
	for name, c := range map[string]struct {
		machine machine
		setting string
		path    string
		partial bool
		passed  []string // texts, one per place
		fails   []string // texts of the error and its remedy
	}{
		"unified": {
			machine: machine{own: unified, dirs: map[string]directory{"/sys/fs/cgroup": whole}},
			path:    "/sys/fs/cgroup",
		},
		"hybrid": {
			machine: machine{own: hybrid, dirs: map[string]directory{"/sys/fs/cgroup": {}, "/sys/fs/cgroup/unified": whole}},
			path:    "/sys/fs/cgroup/unified",
		},
		"version 1 alone": {
			machine: machine{own: hybridV1, dirs: map[string]directory{"/sys/fs/cgroup": {}}},
			fails:   []string{"cgroup 2 is mounted nowhere", "mount -t cgroup2", "unified_cgroup_hierarchy"},
		},
		"a cgroup namespace of its own": {
			machine: machine{own: namespaced, dirs: map[string]directory{"/sys/fs/cgroup": part}},
			fails:   []string{"not in sight", "/sys/fs/cgroup: only a part", "inode 120", "hostPath /sys/fs/cgroup", "hostPID", "intercept.cgroup"},
		},
		"a part whose inode happens to be 1": {
			machine: machine{own: namespaced, dirs: map[string]directory{"/sys/fs/cgroup": {cgroup2: true, inode: 1, child: true}}},
			fails:   []string{"cgroup.type"},
		},
		"a bind mount of a part": {
			machine: machine{own: bound, dirs: map[string]directory{"/sys/fs/cgroup": part}},
			fails:   []string{"only a part"},
		},
		"the host's mount at another place": {
			machine: machine{own: namespaced + hostDir, dirs: map[string]directory{"/sys/fs/cgroup": part, "/host/sys/fs/cgroup": whole}},
			path:    "/host/sys/fs/cgroup", passed: []string{"/sys/fs/cgroup: only a part"},
		},
		"a removed cgroup": {
			machine: machine{own: namespaced, dirs: map[string]directory{"/sys/fs/cgroup": {cgroup2: true, inode: 120, dead: true}}},
			fails:   []string{"has been removed"},
		},
		// Without files it has no cgroup.type either.
		"a removed cgroup before the root": {
			machine: machine{own: namespaced + hostDir, dirs: map[string]directory{
				"/sys/fs/cgroup": {cgroup2: true, inode: 1, dead: true}, "/host/sys/fs/cgroup": whole}},
			path: "/host/sys/fs/cgroup", passed: []string{"/sys/fs/cgroup: a cgroup that has been removed"},
		},
		"the host's, by the root of process 1": {
			machine: machine{own: namespaced, init: unified, dirs: map[string]directory{"/sys/fs/cgroup": part, "/proc/1/root/sys/fs/cgroup": whole}},
			path:    "/proc/1/root/sys/fs/cgroup", passed: []string{"/sys/fs/cgroup: only a part"},
		},
		"process 1 is as confined": {
			machine: machine{own: namespaced, init: bound, dirs: map[string]directory{"/sys/fs/cgroup": part, "/proc/1/root/sys/fs/cgroup": part}},
			fails:   []string{"/sys/fs/cgroup: only", "/proc/1/root/sys/fs/cgroup: only"},
		},
		"process 1 is not ours to look at": {
			machine: machine{own: namespaced, initErr: fs.ErrPermission, dirs: map[string]directory{"/sys/fs/cgroup": part}},
			fails:   []string{"the mounts of process 1: permission denied"},
		},
		"nothing at all, but process 1 has": {
			machine: machine{own: "1 0 8:1 / / rw - ext4 /dev/a rw\n", init: hybrid, dirs: map[string]directory{"/proc/1/root/sys/fs/cgroup/unified": whole}},
			path:    "/proc/1/root/sys/fs/cgroup/unified",
		},
		"several mounts of the root": {
			machine: machine{own: unified + hostDir, dirs: map[string]directory{"/sys/fs/cgroup": whole, "/host/sys/fs/cgroup": whole}},
			path:    "/sys/fs/cgroup", passed: []string{"/host/sys/fs/cgroup: not needed"},
		},
		"a mount over it": {
			machine: machine{own: unified + "31 30 0:99 / /sys/fs/cgroup rw - tmpfs none rw\n" + hostDir,
				dirs: map[string]directory{"/sys/fs/cgroup": {}, "/host/sys/fs/cgroup": whole}},
			path: "/host/sys/fs/cgroup", passed: []string{"/sys/fs/cgroup: another file system is mounted over it"},
		},
		"one place mounted twice": {
			machine: machine{own: unified + namespaced, dirs: map[string]directory{"/sys/fs/cgroup": whole}},
			path:    "/sys/fs/cgroup",
		},
		"a mount that cannot be reached": {
			machine: machine{own: unified + hostDir, dirs: map[string]directory{"/host/sys/fs/cgroup": whole}},
			path:    "/host/sys/fs/cgroup", passed: []string{"/sys/fs/cgroup: file does not exist"},
		},
		"a name with a blank": {
			machine: machine{own: strings.ReplaceAll(unified, "/sys/fs/cgroup", `/host\040root/cgroup`), dirs: map[string]directory{"/host root/cgroup": whole}},
			path:    "/host root/cgroup",
		},
		"a cgroup of the configuration": {
			machine: machine{own: hybrid, dirs: map[string]directory{"/sys/fs/cgroup/unified/node": part}},
			setting: "/sys/fs/cgroup/unified/node", path: "/sys/fs/cgroup/unified/node", partial: true,
		},
		"the root by the configuration": {
			machine: machine{own: unified, dirs: map[string]directory{"/sys/fs/cgroup": whole}},
			setting: "/sys/fs/cgroup", path: "/sys/fs/cgroup",
		},
		"a cgroup of version 1": {
			machine: machine{own: hybrid, dirs: map[string]directory{"/sys/fs/cgroup/cpu/node": {}}}, setting: "/sys/fs/cgroup/cpu/node",
			fails: []string{"intercept.cgroup: /sys/fs/cgroup/cpu/node is no directory of cgroup 2", "below /sys/fs/cgroup/unified"},
		},
		"any directory, and no cgroup 2": {
			machine: machine{own: hybridV1, dirs: map[string]directory{"/var": {}}}, setting: "/var",
			fails: []string{"/var is no directory of cgroup 2", "mount -t cgroup2"},
		},
		"a cgroup that is not there": {
			machine: machine{own: unified}, setting: "/sys/fs/cgroup/node",
			fails: []string{"intercept.cgroup: statfs /sys/fs/cgroup/node", "make the cgroup before"},
		},
		"a removed cgroup of the configuration": {
			machine: machine{own: unified, dirs: map[string]directory{"/mnt": {cgroup2: true, inode: 7, dead: true}}}, setting: "/mnt",
			fails: []string{"/mnt has been removed", "make the cgroup before"},
		},
	} {
		t.Run(name, func(t *testing.T) {
			r, err := c.machine.system().findRoot(c.setting)
			if len(c.fails) > 0 {
				wantUnmet(t, err, c.fails...)
				return
			}
			if err != nil || r.Path != c.path || r.True == c.partial || r.ID != c.machine.dirs[c.path].inode {
				t.Fatalf("%+v, %v; want %s", r, err, c.path)
			}
			if len(r.Passed) != len(c.passed) {
				t.Fatalf("passed over: %q, want %q", r.Passed, c.passed)
			}
			for i, text := range c.passed {
				if !strings.Contains(r.Passed[i], strings.Split(text, ": ")[0]) || !strings.Contains(r.Passed[i], strings.Split(text, ": ")[1]) {
					t.Errorf("passed over: %q, want %q", r.Passed[i], text)
				}
			}
		})
	}
}

// wantUnmet fails unless err is an unmet need with a remedy that say all texts.
func wantUnmet(t *testing.T, err error, texts ...string) {
	t.Helper()
	var u *unmet
	if !errors.As(err, &u) || !errors.Is(err, intercept.ErrNotSupported) || u.remedy == "" {
		t.Fatalf("%v is no unmet need with a remedy", err)
	}
	for _, text := range texts {
		if all := u.Error() + "\n" + u.remedy; !strings.Contains(all, text) {
			t.Errorf("%q is not said in:\n%s", text, all)
		}
	}
}

// That it could not be found out is another answer than that it is not there.
func TestFindRootInconclusive(t *testing.T) {
	for name, s := range map[string]system{
		"no table":     {open: func(string) (io.ReadCloser, error) { return nil, fs.ErrPermission }},
		"a torn table": machine{own: "30 23 0:26 / /sys\n"}.system(),
	} {
		if _, err := s.findRoot(Auto); err == nil || errors.Is(err, intercept.ErrNotSupported) {
			t.Errorf("%s: %v", name, err)
		}
	}
	s := machine{own: unified}.system()
	s.look = func(string) (directory, error) { return directory{}, fs.ErrPermission }
	if _, err := s.findRoot("/sys/fs/cgroup/node"); err == nil || errors.Is(err, intercept.ErrNotSupported) {
		t.Errorf("a directory that may not be looked at: %v", err)
	}
}

func TestRootString(t *testing.T) {
	for want, r := range map[string]Root{
		"/sys/fs/cgroup (id 1, the root of all cgroups)":                    {Path: "/sys/fs/cgroup", ID: 1, True: true},
		"/c/node (id 9, not the root: only what runs below it is diverted)": {Path: "/c/node", ID: 9},
	} {
		if r.String() != want {
			t.Errorf("%q, want %q", r.String(), want)
		}
	}
}

// The answers for this machine are the kernel's own.
func TestLook(t *testing.T) {
	if d, err := look("/proc/self"); err != nil || d.cgroup2 {
		t.Errorf("/proc/self: %+v, %v", d, err)
	}
	if _, err := look("/no/such/directory"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a directory that is not there: %v", err)
	}
	r, err := FindRoot(Auto)
	if errors.Is(err, intercept.ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil || !r.True || r.ID != rootInode {
		t.Fatalf("%+v, %v", r, err)
	}
	if d, err := look(r.Path + "/cgroup.procs"); err != nil || d.cgroup2 {
		t.Errorf("a file is no directory: %+v, %v", d, err)
	}
	if os.Geteuid() != 0 {
		t.Skip("a cgroup cannot be made here: needs root")
	}
	dir, err := os.MkdirTemp(r.Path, "kasway-test-root-")
	if err != nil {
		t.Fatal(err)
	}
	removed := false
	t.Cleanup(func() {
		if !removed {
			_ = os.Remove(dir)
		}
	})
	named, err := FindRoot(dir)
	if err != nil || named.True || named.ID <= rootInode || named.Path != dir {
		t.Errorf("%+v, %v", named, err)
	}
	// An open descriptor still leads to it when its name is gone.
	f, err := os.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := os.Remove(dir); err != nil {
		t.Fatal(err)
	}
	removed = true
	d, err := look(fmt.Sprintf("/proc/self/fd/%d", f.Fd()))
	if err != nil || !d.dead || d.notRoot() == "" {
		t.Errorf("a removed cgroup: %+v, %v", d, err)
	}
}

func FuzzParseMounts(f *testing.F) {
	for _, table := range []string{unified, hybrid, hostDir, namespaced, "", "1 2 3\n", `1 2 0:1 / /a\04 rw - x y z`, " - \n"} {
		f.Add(table)
	}
	f.Fuzz(func(t *testing.T, text string) {
		table, err := ParseMounts(strings.NewReader(text))
		if err == nil && len(table) > strings.Count(text, "\n")+1 {
			t.Errorf("%d mounts in %q", len(table), text)
		}
	})
}

func TestParseMounts(t *testing.T) {
	table, err := ParseMounts(strings.NewReader(hybrid + `9 8 0:31 /a\011b /mnt/\134x\040y rw shared:1 master:2 - bpf kas\040way rw` + "\n" +
		"10 8 0:32 / /e rw - tmpfs  rw\n"))
	if err != nil || len(table) != 5 {
		t.Fatalf("%+v, %v", table, err)
	}
	want := []Mount{
		{ID: "41", Device: "0:38", Root: "/", Point: "/sys/fs/cgroup/unified", Type: "cgroup2", Source: "cgroup2"},
		{ID: "9", Device: "0:31", Root: "/a\tb", Point: `/mnt/\x y`, Type: "bpf", Source: "kas way"},
		{ID: "10", Device: "0:32", Root: "/", Point: "/e", Type: "tmpfs"},
	}
	if !slices.Equal(table[2:], want) {
		t.Errorf("%+v, want %+v", table[2:], want)
	}
}

func TestFindBPFFS(t *testing.T) {
	const (
		sys    = "27 1 8:1 / / rw shared:1 - ext4 /dev/a rw\n20 27 0:22 / /sys rw - sysfs sysfs rw\n"
		jail   = "90 80 0:55 / / rw - overlay overlay rw\n20 27 0:22 / /sys rw - sysfs sysfs rw\n" // a container's
		cell   = "95 85 8:1 / / rw - ext4 /dev/a rw\n96 95 0:22 / /sys rw - sysfs sysfs rw\n"      // a mount namespace's
		nodes  = "50 20 0:40 / /sys/fs/bpf rw shared:3 - bpf bpf rw,mode=700\n"
		ours   = "50 20 0:40 / /sys/fs/bpf rw shared:3 - bpf kasway rw,mode=700\n"
		others = "50 20 0:41 / /sys/fs/bpf rw - bpf bpf rw,mode=700\n"
		moved  = "51 20 0:41 / /host/bpf rw - bpf bpf rw,mode=700\n"
	)
	dirs := map[string]directory{}
	for name, c := range map[string]struct {
		machine machine
		dir     string
		may     bool
		want    BPFFS
		note    string
		fails   []string
	}{
		"mounted":                    {machine: machine{own: sys + nodes}, want: BPFFS{Point: BPFFSPoint}},
		"mounted by an agent":        {machine: machine{own: sys + ours}, want: BPFFS{Point: BPFFSPoint, Ours: true}},
		"missing, may be mounted":    {machine: machine{own: sys}, may: true, want: BPFFS{Point: BPFFSPoint, Missing: true}},
		"missing, may not":           {machine: machine{own: sys}, fails: []string{"no bpffs is mounted at /sys/fs/bpf", "mount -t bpf bpf /sys/fs/bpf", "CAP_SYS_ADMIN"}},
		"missing, for pins below":    {machine: machine{own: sys}, dir: DefaultPinDir, may: true, want: BPFFS{Point: BPFFSPoint, Missing: true}},
		"covered":                    {machine: machine{own: sys + nodes + "60 50 0:50 / /sys/fs rw - tmpfs none rw\n61 50 0:51 / /sys/fs/bpf rw - tmpfs none rw\n"}, fails: []string{"no bpffs is mounted"}},
		"a folder of another one":    {machine: machine{own: sys + moved}, dir: "/host/bpf/pins", want: BPFFS{Point: "/host/bpf"}},
		"a folder of none":           {machine: machine{own: sys}, dir: "/tmp/pins", may: true, fails: []string{"no bpffs is mounted at /tmp/pins"}},
		"a similar name":             {machine: machine{own: sys + moved}, dir: "/host/bpf2", may: true, fails: []string{"no bpffs is mounted at /host/bpf2"}},
		"the node's, in a container": {machine: machine{own: jail + nodes, init: sys + nodes}, want: BPFFS{Point: BPFFSPoint}},
		"the node's, elsewhere":      {machine: machine{own: jail + others, init: sys + moved}, want: BPFFS{Point: BPFFSPoint}},
		"a container's own":          {machine: machine{own: jail + others, init: sys + nodes}, may: true, fails: []string{"ends with it", "hostPath /sys/fs/bpf", "Bidirectional"}},
		"the node has none at all":   {machine: machine{own: jail + others, init: sys}, may: true, fails: []string{"ends with it"}},
		"would be a container's own": {machine: machine{own: jail, init: sys + nodes}, may: true, fails: []string{"would end with its container", "mount it on the node", "HostToContainer"}},
		"a mount namespace's own":    {machine: machine{own: cell + others, init: sys + nodes}, want: BPFFS{Point: BPFFSPoint}, note: "in this mount namespace alone"},
		"process 1 is hidden":        {machine: machine{own: sys + nodes, initErr: fs.ErrPermission}, want: BPFFS{Point: BPFFSPoint}, note: "cannot be told: permission denied"},
	} {
		c.machine.dirs = dirs
		got, err := c.machine.system().findBPFFS(c.dir, c.may)
		if len(c.fails) > 0 {
			t.Run(name, func(t *testing.T) { wantUnmet(t, err, c.fails...) })
			continue
		}
		if !strings.Contains(got.Note, c.note) || (c.note == "") != (got.Note == "") {
			t.Errorf("%s: note %q, want %q", name, got.Note, c.note)
		}
		got.Note = ""
		if err != nil || got != c.want {
			t.Errorf("%s: %+v, %v; want %+v", name, got, err, c.want)
		}
	}
	if keys := slices.Collect(maps.Keys(dirs)); len(keys) > 0 {
		t.Errorf("looked at %q", keys)
	}
}
