package cgroupbpf

import (
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/link"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

// leftNothing fails the test if root has sub-cgroups or programs.
func leftNothing(t *testing.T, root string) {
	t.Helper()
	if got := leftovers(t, root); len(got) != 0 {
		t.Errorf("left behind: %q", got)
	}
	got, err := netns.AttachedTo(root)
	if err != nil || len(got) != 0 {
		t.Errorf("attached to the cgroup above: %v, %v", got, err)
	}
}

// A connect is seen to be diverted, and nothing is left; nothing of it is
// attached to the cgroup itself, where others run.
func TestTry(t *testing.T) {
	root := ownRoot(t)
	for range 2 {
		notes, err := try(t.Context(), root)
		if err != nil || len(notes) != 0 {
			t.Errorf("%q, %v", notes, err)
		}
		leftNothing(t, root)
	}
}

// passing is a program that lets every connect pass.
func passing(t *testing.T) *ebpf.Program {
	t.Helper()
	return passingAt(t, ebpf.AttachCGroupInet4Connect)
}

func passingAt(t *testing.T, at ebpf.AttachType) *ebpf.Program {
	t.Helper()
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: at, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = p.Close() })
	return p
}

// Somebody's program that suffers no other below it is named: the kernel's
// answer is the one for a missing privilege, which would lead nowhere.
func TestTryBelowAnExclusiveProgram(t *testing.T) {
	root := ownRoot(t)
	dir, err := os.Open(root)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	p := passing(t)
	at := link.RawAttachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet4Connect}
	if err := link.RawAttachProgram(at); err != nil {
		t.Fatal(err)
	}
	_, err = try(t.Context(), root)
	wantUnmet(t, err, "connect4", "BPF_F_ALLOW_MULTI", "bpftool cgroup tree")
	if r := refusal(err); errors.Is(r.Err, intercept.ErrPrivilege) {
		t.Errorf("taken for a missing privilege: %v", r.Err)
	}
	if err := link.RawDetachProgram(link.RawDetachProgramOptions{Target: int(dir.Fd()), Program: p, Attach: ebpf.AttachCGroupInet4Connect}); err != nil {
		t.Fatal(err)
	}
	leftNothing(t, root)
}

// Where the tree is mounted read-only the programs are loaded all the same, and
// a note says what was not tried.
func TestTryReadOnly(t *testing.T) {
	root := ownRoot(t)
	onThread(func() {
		err := errors.Join(
			unix.Unshare(unix.CLONE_NEWNS),
			unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount(root, root, "", unix.MS_BIND, ""),
			unix.Mount("", root, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY, ""))
		if err != nil {
			t.Error(err)
			return
		}
		notes, err := try(t.Context(), root)
		if err != nil || len(notes) != 1 || !strings.Contains(notes[0], "not tried") || !strings.Contains(notes[0], "read-only") {
			t.Errorf("%q, %v; want one note", notes, err)
		}
	})
	leftNothing(t, root)
}

// onThread runs f on a thread that ends with it. Never on the first one: that
// does not end, and /proc/self means its mount namespace.
func onThread(f func()) {
	done := make(chan struct{})
	go func() {
		defer close(done)
		runtime.LockOSThread() // and never unlock
		if unix.Gettid() == os.Getpid() {
			onThread(f) // on another, while this one is busy
			runtime.UnlockOSThread()
			return
		}
		f()
	}()
	<-done
}

// A probe that is killed half-way leaves a cgroup, and no program: the next one
// sweeps it.
func TestTryAfterAKilledOne(t *testing.T) {
	root := ownRoot(t)
	left := filepath.Join(root, scratchPrefix+"killed")
	if err := os.Mkdir(left, 0o755); err != nil {
		t.Fatal(err)
	}
	dir, err := os.Open(left)
	if err != nil {
		t.Fatal(err)
	}
	defer dir.Close()
	child := exec.Command("sleep", "60")
	child.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(dir.Fd())}
	if err := child.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- child.Wait() }()
	if _, err := try(t.Context(), root); err != nil {
		t.Error(err)
	}
	select {
	case err := <-ended:
		_ = err // that it was killed
	case <-time.After(5 * time.Second):
		t.Error("the killed probe's child runs on")
		_ = child.Process.Kill()
		if err := <-ended; err == nil {
			t.Error("it ended well")
		}
	}
	leftNothing(t, root)
}

// A bpffs that an agent has mounted goes once nothing is pinned there, and
// anybody else's stays.
func TestRemoveBPFFS(t *testing.T) {
	netns.Require(t)
	point := t.TempDir()
	mounted := func() bool {
		t.Helper()
		table, err := here().mounts(ownMounts)
		if err != nil {
			t.Fatal(err)
		}
		m, _ := covering(table, point)
		return m.Point == point
	}
	remove := func() {
		t.Helper()
		if err := here().removeBPFFS(point); err != nil {
			t.Error(err)
		}
	}
	t.Cleanup(func() {
		if mounted() {
			_ = unix.Unmount(point, unix.MNT_DETACH)
		}
	})
	remove() // nothing is there
	if err := unix.Mount("bpf", point, "bpf", 0, ""); err != nil {
		t.Fatal(err)
	}
	if remove(); !mounted() {
		t.Error("somebody else's bpffs was unmounted")
	}
	if err := unix.Unmount(point, 0); err != nil {
		t.Fatal(err)
	}
	if err := (BPFFS{Point: point, Missing: true}).Ensure(); err != nil || !mounted() {
		t.Fatalf("mounted: %t, %v", mounted(), err)
	}
	if err := (BPFFS{Point: point}).Ensure(); err != nil {
		t.Error(err)
	}
	pin := filepath.Join(point, "pin")
	if err := passing(t).Pin(pin); err != nil {
		t.Fatal(err)
	}
	if remove(); !mounted() {
		t.Error("a bpffs with a pin in it was unmounted")
	}
	if err := os.Remove(pin); err != nil {
		t.Fatal(err)
	}
	if remove(); mounted() {
		t.Error("our own bpffs, with nothing pinned, is still mounted")
	}
}

// The whole preflight, in a cgroup and with a bpffs of the test's own.
func TestPreflightHere(t *testing.T) {
	root := ownRoot(t)
	pins := t.TempDir()
	if err := unix.Mount("bpf", pins, "bpf", 0, "mode=0700"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := unix.Unmount(pins, 0); err != nil {
			t.Error(err)
		}
	}()
	m := New(Config{Cgroup: root, PinDir: filepath.Join(pins, "kasway")})
	r := m.Preflight(t.Context())
	if r.Err != nil || len(r.Notes) == 0 || !strings.Contains(r.Notes[0], "attaches to "+root) || !strings.Contains(r.Notes[0], "not the root") {
		t.Errorf("%v, %q", r.Err, r.Notes)
	}
	leftNothing(t, root)
	if _, err := os.Stat(filepath.Join(pins, "kasway")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("something was pinned: %v", err)
	}
	r = New(Config{Cgroup: root, PinDir: "/nowhere"}).Preflight(t.Context())
	if !errors.Is(r.Err, intercept.ErrNotSupported) || !strings.Contains(r.Err.Error(), "no bpffs") || r.Remedy == "" {
		t.Errorf("without a bpffs: %v, %q", r.Err, r.Remedy)
	}
}
