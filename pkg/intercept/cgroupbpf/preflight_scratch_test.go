package cgroupbpf

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

// ownRoot is a cgroup that only this test uses, in place of the machine's root.
func ownRoot(t *testing.T) string {
	t.Helper()
	netns.Require(t)
	r, err := FindRoot(Auto)
	if errors.Is(err, intercept.ErrNotSupported) {
		t.Skip(err)
	}
	if err != nil {
		t.Fatal(err)
	}
	dir, err := os.MkdirTemp(r.Path, "kasway-test-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// A test that fails may have left some.
		if err := errors.Join(sweepScratch(dir), removeScratch(dir)); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// leftovers are the scratch cgroups below root.
func leftovers(t *testing.T, root string) []string {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(root, scratchPrefix+"*"))
	if err != nil {
		t.Fatal(err)
	}
	return found
}

// What a killed probe has left, with a process in it, is swept; what another
// probe uses is not.
func TestSweepScratch(t *testing.T) {
	root := ownRoot(t)
	used, err := newScratch(root)
	if err != nil {
		t.Fatal(err)
	}
	left := filepath.Join(root, scratchPrefix+"left")
	other := filepath.Join(root, "somebody's")
	for _, dir := range []string{left, other} {
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	defer func() { _ = os.Remove(other) }()
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
	reaped := make(chan struct{})
	go func() { _ = child.Wait(); close(reaped) }() // it is killed
	if err := sweepScratch(root); err != nil {
		t.Error(err)
	}
	<-reaped
	if got := leftovers(t, root); len(got) != 1 || got[0] != used.path {
		t.Errorf("left: %q, want %q", got, used.path)
	}
	if _, err := os.Stat(other); err != nil {
		t.Errorf("a cgroup of somebody else: %v", err)
	}
	if err := used.remove(); err != nil {
		t.Error(err)
	}
	if got := leftovers(t, root); len(got) != 0 {
		t.Errorf("left: %q", got)
	}
}

// The child's socket is of the scratch cgroup, and its errno comes back.
func TestConnectFrom(t *testing.T) {
	s, err := newScratch(ownRoot(t))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := s.remove(); err != nil {
			t.Error(err)
		}
	}()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	at := l.Addr().(*net.TCPAddr).AddrPort()
	if err := connectFrom(t.Context(), s.dir, at); err != nil {
		t.Error(err)
	}
	if err := l.(*net.TCPListener).SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		t.Fatal(err)
	}
	if c, err := l.Accept(); err != nil {
		t.Errorf("nothing has arrived: %v", err)
	} else {
		_ = c.Close()
	}
	l.Close()
	if err := connectFrom(t.Context(), s.dir, at); !errors.Is(err, syscall.ECONNREFUSED) || !strings.Contains(err.Error(), at.String()) {
		t.Errorf("got %v, want the child's ECONNREFUSED", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var none *noChild
	if err := connectFrom(ctx, s.dir, netip.MustParseAddrPort("127.0.0.1:1")); !errors.As(err, &none) {
		t.Errorf("got %v, want that there was no child", err)
	}
}
