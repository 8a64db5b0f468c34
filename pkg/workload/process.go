package workload

import (
	"bytes"
	"fmt"
	"os"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// initialPIDs is the inode of the initial pid namespace, a constant of the
// kernel (PROC_PID_INIT_INO).
const initialPIDs = 0xEFFFFFFC

// maxCommandLine bounds what is read of one, in bytes.
const maxCommandLine = 4096

// CommandLine is how the process pid was started, its arguments separated by
// spaces, if that process is still the one that had this pid at the given time.
// It is empty if not, or if it cannot be told: pid is one of the initial pid
// namespace, and /proc shows that only to a process in it.
func CommandLine(pid uint32, at time.Time) string {
	if inode, err := inodeOf("/proc/self/ns/pid"); err != nil || inode != initialPIDs {
		return ""
	}
	dir := fmt.Sprintf("/proc/%d/", pid)
	line, err := readStart(dir+"cmdline", maxCommandLine)
	if err != nil {
		return ""
	}
	// After the command line: a process that started before that moment had the
	// pid then, and since it still has it, the line read is its.
	started, err := startOf(dir + "stat")
	if err != nil || started.After(at) {
		return ""
	}
	return string(bytes.ReplaceAll(bytes.TrimRight(line, "\x00"), []byte{0}, []byte{' '}))
}

func inodeOf(path string) (uint64, error) {
	var s unix.Stat_t
	if err := unix.Stat(path, &s); err != nil {
		return 0, err
	}
	return s.Ino, nil
}

func readStart(path string, most int) ([]byte, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	b := make([]byte, most)
	n, err := f.Read(b)
	return b[:n], err
}

// userHZ is in what /proc/PID/stat counts, on every architecture that Go knows.
const userHZ = 100

// startOf is when a process started, from field 22 of its stat, rounded down to
// a hundredth of a second.
func startOf(stat string) (time.Time, error) {
	b, err := os.ReadFile(stat)
	if err != nil {
		return time.Time{}, err
	}
	// The second field is the command, in parentheses, and may hold some itself.
	fields := strings.Fields(string(b[bytes.LastIndexByte(b, ')')+1:]))
	const start = 22 - 3
	if len(fields) <= start {
		return time.Time{}, fmt.Errorf("%s has only %d fields", stat, len(fields)+2)
	}
	ticks, err := strconv.ParseInt(fields[start], 10, 64)
	if err != nil {
		return time.Time{}, fmt.Errorf("start in %s: %w", stat, err)
	}
	var up unix.Timespec
	if err := unix.ClockGettime(unix.CLOCK_BOOTTIME, &up); err != nil {
		return time.Time{}, fmt.Errorf("reading the time since boot: %w", err)
	}
	age := time.Duration(up.Nano()) - time.Duration(ticks)*(time.Second/userHZ)
	return time.Now().Add(-age), nil
}
