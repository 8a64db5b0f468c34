package workload

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"golang.org/x/time/rate"
)

// tree makes directories that stand for cgroups; mkdir returns the new one's id.
func tree(t *testing.T) (x *Index, mkdir func(path string) uint64) {
	t.Helper()
	root := t.TempDir()
	x = newIndex(root)
	return x, func(path string) uint64 {
		t.Helper()
		full := filepath.Join(root, path)
		if err := os.MkdirAll(full, 0o700); err != nil {
			t.Fatal(err)
		}
		return inode(t, full)
	}
}

func inode(t *testing.T, path string) uint64 {
	t.Helper()
	info, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	return info.Sys().(*syscall.Stat_t).Ino
}

func wantPath(t *testing.T, x *Index, id uint64, path string) {
	t.Helper()
	if w, known := x.Find(id); !known || w.Path != path {
		t.Errorf("cgroup %d is %+v, %v, want %s", id, w, known, path)
	}
}

func TestIndexFinds(t *testing.T) {
	x, mkdir := tree(t)
	kubelet := mkdir("system.slice/kubelet.service")
	if err := os.WriteFile(filepath.Join(x.root, "system.slice/cgroup.procs"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	wantPath(t, x, inode(t, x.root), "/")
	wantPath(t, x, kubelet, "/system.slice/kubelet.service")
	later := mkdir("system.slice/later.service")
	wantPath(t, x, later, "/system.slice/later.service")
	// A connection outlives the cgroup that it was made in.
	last := mkdir("system.slice/last.service")
	if err := os.Remove(filepath.Join(x.root, "system.slice/kubelet.service")); err != nil {
		t.Fatal(err)
	}
	wantPath(t, x, last, "/system.slice/last.service")
	wantPath(t, x, kubelet, "/system.slice/kubelet.service")
}

// Ids that are not there cost a bounded number of looks, and what is known is
// told without any.
func TestIndexLooksSeldom(t *testing.T) {
	x, mkdir := tree(t)
	kubelet := mkdir("system.slice/kubelet.service")
	wantPath(t, x, kubelet, "/system.slice/kubelet.service")
	x.walks = rate.NewLimiter(0, 2)
	for range 100 {
		if w, known := x.Find(1 << 60); known {
			t.Fatalf("found %+v", w)
		}
	}
	if left := x.walks.Tokens(); left != 1 {
		t.Errorf("%v looks for one id that is gone for good, want 1", 2-left)
	}
	for i := range uint64(100) {
		x.Find(1<<61 + i)
	}
	later := mkdir("system.slice/later.service")
	if w, known := x.Find(later); known {
		t.Errorf("found %+v, though no look was left", w)
	}
	wantPath(t, x, kubelet, "/system.slice/kubelet.service")
	x.walks = rate.NewLimiter(0, 1)
	wantPath(t, x, later, "/system.slice/later.service") // it was not taken for gone
}

// A container fills its own cgroup with others: the node's are found all the
// same, and those without end are not followed.
func TestIndexIsBounded(t *testing.T) {
	x, mkdir := tree(t)
	unit := mkdir("system.slice/kubelet.service")
	name := strings.Repeat("x", 250)
	long := mkdir("a" + strings.Repeat("/"+name, 2))
	mkdir("b" + strings.Repeat("/"+name, 5))
	deep := mkdir("c" + strings.Repeat("/d", maxDepth+3))
	wantPath(t, x, unit, "/system.slice/kubelet.service")
	wantPath(t, x, long, "/a"+strings.Repeat("/"+name, 2))
	for range 2 { // nor are they taken for gone
		if w, known := x.Find(deep); known || len(x.gone) > 0 {
			t.Errorf("found %d bytes, known %v, %d gone", len(w.Path), known, len(x.gone))
		}
	}
}

func TestIndexMany(t *testing.T) {
	x, mkdir := tree(t)
	for i := range 300 {
		mkdir(fmt.Sprintf("kubepods/pod%d/inner", i))
	}
	ids := []uint64{mkdir("a.service"), mkdir("b.service")}
	var wg sync.WaitGroup
	for i := range 8 {
		wg.Go(func() {
			if _, known := x.Find(ids[i%2]); !known {
				t.Errorf("not found")
			}
		})
	}
	wg.Wait()
	if used := 8 - x.walks.Tokens(); used > 2 {
		t.Errorf("%v looks, one was enough", used)
	}
}

// The kernel's own: an id is a directory's inode, and directories tell by their
// links whether others are below.
func TestIndexOfTheKernel(t *testing.T) {
	const unified = "/sys/fs/cgroup/unified"
	root := unified
	if _, err := NewIndex(root); err != nil {
		root = "/sys/fs/cgroup"
	}
	x, err := NewIndex(root)
	if err != nil {
		t.Skipf("no cgroup 2 here: %v", err)
	}
	name := fmt.Sprintf("kasway-test-workload-%d", os.Getpid())
	inner := filepath.Join(name, "system.slice", "kubelet.service")
	if err := os.MkdirAll(filepath.Join(root, inner), 0o755); err != nil {
		if os.Getenv("REQUIRE_PRIV") == "1" {
			t.Fatal(err)
		}
		t.Skipf("no cgroup can be made: %v", err)
	}
	t.Cleanup(func() {
		for dir := inner; dir != "."; dir = filepath.Dir(dir) {
			if err := os.Remove(filepath.Join(root, dir)); err != nil {
				t.Error(err)
			}
		}
	})
	at := inode(t, filepath.Join(root, inner))
	wantPath(t, x, at, "/"+inner)
	node, err := NewIndex(filepath.Join(root, name)) // a node within the hierarchy
	if err != nil {
		t.Fatal(err)
	}
	if w, known := node.Find(at); !known || w.Unit != "kubelet.service" {
		t.Errorf("%+v, %v", w, known)
	}
	if _, err := NewIndex(t.TempDir()); err == nil {
		t.Error("a plain directory is taken for a cgroup")
	}
}
