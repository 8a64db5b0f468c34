package cgroupbpf

import (
	"bufio"
	"fmt"
	"io"
	"strings"
)

// Mount is one line of a mount table, as far as it is of use here.
type Mount struct {
	// ID is the mount's; a mount namespace shares none with another.
	ID string
	// Device tells file systems apart: two mounts of one have it in common.
	Device string
	// Root is which directory of the file system is mounted.
	Root string
	// Point is where, as the owner of the table sees it.
	Point string
	// Type is that of the file system: "cgroup2", "bpf".
	Type string
	// Source is what the mounting program has said that it mounts.
	Source string
}

// ParseMounts reads a table in the form of /proc/PID/mountinfo, in its order:
// what comes later covers what came before.
func ParseMounts(r io.Reader) (table []Mount, err error) {
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20) // an overlay of many layers has a very long line
	for lines.Scan() {
		// 31 23 0:28 / /sys/fs/cgroup rw,relatime shared:9 - cgroup2 cgroup2 rw
		front, back, ok := strings.Cut(lines.Text(), " - ")
		f, b := strings.Fields(front), strings.Fields(back)
		if !ok || len(f) < 6 || len(b) < 1 {
			return nil, fmt.Errorf("mount table: line %d is %q", len(table)+1, lines.Text())
		}
		table = append(table, Mount{ID: f[0], Device: f[2], Root: unescape(f[3]), Point: unescape(f[4]), Type: b[0], Source: source(b)})
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("mount table: %w", err)
	}
	return table, nil
}

// source is the second field behind the dash, which may be empty.
func source(back []string) string {
	if len(back) < 3 {
		return ""
	}
	return unescape(back[1])
}

// unescape undoes how the kernel writes blanks and backslashes: "\040".
func unescape(s string) string {
	var b strings.Builder
	for i := 0; i < len(s); i++ {
		if s[i] == '\\' && i+3 < len(s) && octal(s[i+1]) && octal(s[i+2]) && octal(s[i+3]) {
			b.WriteByte((s[i+1]-'0')<<6 | (s[i+2]-'0')<<3 | (s[i+3] - '0'))
			i += 3
			continue
		}
		b.WriteByte(s[i])
	}
	return b.String()
}

func octal(c byte) bool { return '0' <= c && c <= '7' }
