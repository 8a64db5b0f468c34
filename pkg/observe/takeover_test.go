package observe

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"testing"
)

// names lists what is in the folder of path.
func names(t *testing.T, path string) (out []string) {
	t.Helper()
	entries, err := os.ReadDir(filepath.Dir(path))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		out = append(out, e.Name())
	}
	return out
}

func TestTakeOver(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	first, other, err := TakeOver(path, "a")
	if err != nil || other {
		t.Fatalf("%v, another is there: %v", err, other)
	}
	second, other, err := TakeOver(path, "b")
	if err != nil || !other {
		t.Fatalf("beside a living one: %v, another is there: %v", err, other)
	}
	if to, err := os.Readlink(path); err != nil || to != "agent-b.sock" {
		t.Errorf("the path leads to %q, %v, want the newest", to, err)
	}
	if err := RemoveStale(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("RemoveStale of living ones: %v", err)
	}
	if err := first.Close(); err != nil {
		t.Errorf("the older one ends: %v", err)
	}
	if !Answers(path) {
		t.Error("the older one took the newest's path with it")
	}
	if err := second.Close(); err != nil {
		t.Errorf("the newest ends: %v", err)
	}
	if left := names(t, path); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// The newer of two may end first, as when an upgrade is taken back.
func TestTakeOverTakenBack(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	first, _, err := TakeOver(path, "a")
	if err != nil {
		t.Fatal(err)
	}
	second, _, err := TakeOver(path, "b")
	if err != nil {
		t.Fatal(err)
	}
	if err := second.Close(); err != nil {
		t.Error(err)
	}
	if to, err := os.Readlink(path); err != nil || to != "agent-a.sock" || !Answers(path) {
		t.Errorf("the path leads to %q, %v, want the one that is left", to, err)
	}
	if err := first.Close(); err != nil {
		t.Error(err)
	}
	if left := names(t, path); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

// killed leaves what a killed process does.
func killed(t *testing.T, path string) {
	t.Helper()
	l, _, err := TakeOver(path, "dead")
	if err != nil {
		t.Fatal(err)
	}
	socket := l.(*takenOver).Listener.(*net.UnixListener)
	socket.SetUnlinkOnClose(false)
	if err := socket.Close(); err != nil {
		t.Fatal(err)
	}
}

func TestTakeOverAfterAKill(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	killed(t, path)
	l, other, err := TakeOver(path, "next")
	if err != nil || other {
		t.Fatalf("%v, another is there: %v", err, other)
	}
	if err := l.Close(); err != nil {
		t.Error(err)
	}
	killed(t, path)
	for range 2 {
		if err := RemoveStale(path); err != nil {
			t.Errorf("RemoveStale: %v", err)
		}
	}
	if left := names(t, path); len(left) > 0 {
		t.Errorf("left behind: %v", left)
	}
}

func TestTakeOverLeavesOthersAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, err := ListenSocket(path) // somebody else's, no link
	if err != nil {
		t.Fatal(err)
	}
	if _, _, err := TakeOver(path, "a"); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a socket that answers: %v", err)
	}
	if err := l.Close(); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("x"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, _, err := TakeOver(path, "a"); err == nil {
		t.Error("a file is in the way, and was taken")
	}
	if text, err := os.ReadFile(path); err != nil || string(text) != "x" {
		t.Errorf("the file is %q, %v now", text, err)
	}
}
