package workload

import (
	"os"
	"os/exec"
	"testing"
	"time"
)

func TestCommandLine(t *testing.T) {
	before := time.Now().Add(-time.Second)
	cmd := exec.Command("sleep", "1000")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _, _ = cmd.Process.Kill(), cmd.Wait() })
	pid := uint32(cmd.Process.Pid)
	want := "sleep 1000"
	if inode, err := inodeOf("/proc/self/ns/pid"); err != nil || inode != initialPIDs {
		want = "" // these are not the pids that the kernel knows
	}
	if got := CommandLine(pid, time.Now()); got != want {
		t.Errorf("command line %q, want %q", got, want)
	}
	if got := CommandLine(pid, before); got != "" {
		t.Errorf("%q is said to have run before it was started", got)
	}
	if got := CommandLine(1<<30, time.Now()); got != "" {
		t.Errorf("no process has the command line %q", got)
	}
}

func TestStartOf(t *testing.T) {
	// A command may look like what comes after it.
	file := t.TempDir() + "/stat"
	if err := os.WriteFile(file, []byte("7 (a) S 9 (b)) S 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 0 20"), 0o600); err != nil {
		t.Fatal(err)
	}
	boot, err := startOf(file)
	if err != nil || time.Since(boot) < time.Second {
		t.Errorf("started at %v, %v, want at boot", boot, err)
	}
	if started, err := startOf("/proc/self/stat"); err != nil || time.Since(started) < 0 || time.Since(started) > time.Hour {
		t.Errorf("this process started at %v, %v", started, err)
	}
	if err := os.WriteFile(file, []byte("7 (a) S 1"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := startOf(file); err == nil {
		t.Error("a short line has a start")
	}
}
