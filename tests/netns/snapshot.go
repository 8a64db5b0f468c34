package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"golang.org/x/sys/unix"
)

// Snapshot is everything that a process can leave behind in a namespace and
// around it: lines by kind ("nft", "routes", "sysctl", ...).
type Snapshot map[string][]string

// Around says what to look at besides the namespace itself.
type Around struct {
	// BPF adds the machine's BPF programs, maps and links whose name begins
	// with one of these; "" means every one.
	BPF []string
	// Cgroups adds what is attached to these cgroups and to those below them,
	// which is a lab's own where BPF would show that of every lab.
	Cgroups []string
	// Trees are directories (bpffs pins, cgroups, state, sockets) of which
	// every entry is listed: files with their mode and size. Of cgroups only
	// the directories are: their files come with them.
	Trees []string
}

// commands print one kind each. They must not change anything, not even by
// creating a table: iptables-save lists only what exists.
var commands = []struct {
	kind, line string
	clean      func(string) []string
}{
	{"nft", "nft -s list ruleset", cleanNft},
	{"iptables-nft", "iptables-nft-save", cleanSave},
	{"ip6tables-nft", "ip6tables-nft-save", cleanSave},
	{"iptables-legacy", "iptables-legacy-save", cleanSave},
	{"ip6tables-legacy", "ip6tables-legacy-save", cleanSave},
	{"ipset", "ipset save", cleanIPSet},
	{"rules", "ip -4 rule show", plain},
	{"rules6", "ip -6 rule show", plain},
	{"routes", "ip -4 route show table all", plain},
	{"routes6", "ip -6 route show table all", plain},
	{"addresses", "ip -o address show", plain},
	{"links", "ip -o link show", plain},
}

// Snapshot looks at everything.
func (h *Host) Snapshot(around Around) (Snapshot, error) {
	s := Snapshot{}
	for _, c := range commands {
		args := strings.Fields(c.line)
		out, err := h.Run(args[0], args[1:]...)
		if err != nil {
			return nil, err
		}
		s[c.kind] = c.clean(out)
	}
	var err error
	if s["sysctl"], err = h.sysctls(); err != nil {
		return nil, err
	}
	if len(around.BPF) > 0 {
		if s["bpf"], err = bpfObjects(around.BPF); err != nil {
			return nil, err
		}
	}
	for _, dir := range around.Cgroups {
		if s["attached "+dir], err = attachedBelow(dir); err != nil {
			return nil, err
		}
	}
	for _, dir := range around.Trees {
		if s[dir], err = tree(dir); err != nil {
			return nil, err
		}
	}
	return s, nil
}

// Diff lists what is in one of the snapshots only, as "kind: -line" for what
// has gone and "kind: +line" for what has come; nil if they are equal.
func (s Snapshot) Diff(later Snapshot) []string {
	kinds := map[string]bool{}
	for k := range s {
		kinds[k] = true
	}
	for k := range later {
		kinds[k] = true
	}
	var diff []string
	for k := range kinds {
		diff = append(diff, minus(k+": -", s[k], later[k])...)
		diff = append(diff, minus(k+": +", later[k], s[k])...)
	}
	slices.Sort(diff)
	return diff
}

// minus is the multiset difference a − b, each line with a prefix.
func minus(prefix string, a, b []string) (only []string) {
	count := map[string]int{}
	for _, line := range b {
		count[line]++
	}
	for _, line := range a {
		if count[line]--; count[line] < 0 {
			only = append(only, prefix+line)
		}
	}
	return only
}

func plain(out string) (lines []string) {
	for line := range strings.Lines(out) {
		if line = strings.Join(strings.Fields(line), " "); line != "" {
			lines = append(lines, line)
		}
	}
	return lines
}

var (
	expires  = regexp.MustCompile(` expires \S+?([ ,]|$)`)
	counters = regexp.MustCompile(`\[\d+:\d+\]`)
	ipsetAge = regexp.MustCompile(` (timeout|packets|bytes|initval) \S+`)
)

// cleanNft names each line by its table and chain, so that Diff does not
// confuse equal rules of different chains. What iptables-nft never takes back
// is left out: its base chains without a rule, and the tables they stand in.
func cleanNft(out string) (lines []string) {
	var table, block string
	base := false
	for line := range strings.Lines(out) {
		text := expires.ReplaceAllString(strings.TrimSpace(line), "$1")
		switch {
		case strings.HasPrefix(line, "table "):
			table, block = strings.TrimSuffix(text, " {"), ""
			if !iptablesTable.MatchString(table) {
				lines = append(lines, table)
			}
		case strings.HasPrefix(line, "\t") && strings.HasSuffix(text, "{") && !strings.HasPrefix(line, "\t\t"):
			block = strings.TrimSuffix(text, " {")
			base = iptablesTable.MatchString(table) && iptablesBase.MatchString(block)
			if !base {
				lines = append(lines, table+" "+block)
			}
		case text == "" || text == "}", base && strings.HasPrefix(text, "type ") && strings.HasSuffix(text, "policy accept;"):
		default:
			lines = append(lines, table+" "+block+": "+text)
		}
	}
	return lines
}

var (
	iptablesTable = regexp.MustCompile(`^table ip6? (filter|nat|mangle|raw|security)$`)
	iptablesBase  = regexp.MustCompile(`^chain (PREROUTING|INPUT|FORWARD|OUTPUT|POSTROUTING)$`)
)

// cleanSave reads iptables-save. Built-in chains with policy ACCEPT are left
// out: the kernel keeps a legacy table for ever once it was listed.
func cleanSave(out string) (lines []string) {
	table := ""
	for line := range strings.Lines(out) {
		line = counters.ReplaceAllString(strings.TrimSpace(line), "")
		switch {
		case strings.HasPrefix(line, "*"):
			table = line
		case line == "", line == "COMMIT", line[0] == '#', line[0] == ':' && strings.HasSuffix(strings.TrimSpace(line), " ACCEPT"):
		default:
			lines = append(lines, table+" "+line)
		}
	}
	return lines
}

// cleanIPSet keeps a set's own timeout and drops those of its elements.
func cleanIPSet(out string) (lines []string) {
	for _, line := range plain(out) {
		if strings.HasPrefix(line, "add ") {
			line = ipsetAge.ReplaceAllString(line, "")
		}
		lines = append(lines, regexp.MustCompile(` initval \S+`).ReplaceAllString(line, ""))
	}
	return lines
}

// volatile are sysctls that change by themselves or differ at each reading.
var volatile = regexp.MustCompile(`/(nf_conntrack_count|stable_secret|tcp_fastopen_key|flush|route/.*|fib_sync_mem|tcp_mem|udp_mem|gc_.*)$`)

// sysctls lists /proc/sys/net as the namespace has it.
func (h *Host) sysctls() (lines []string, err error) {
	err = h.Do(func() error {
		return filepath.WalkDir("/proc/sys/net", func(path string, d fs.DirEntry, err error) error {
			if err != nil || d.IsDir() || volatile.MatchString(path) {
				return ignoreMissing(err)
			}
			value, err := os.ReadFile(path)
			if err != nil {
				return nil // write-only, or gone with its device
			}
			lines = append(lines, path[len("/proc/sys/"):]+" = "+strings.Join(strings.Fields(string(value)), " "))
			return nil
		})
	})
	if err != nil {
		return nil, fmt.Errorf("netns: sysctls of %s: %w", h.Label, err)
	}
	return lines, nil
}

// tree lists every entry below dir; a missing dir is an empty one.
func tree(dir string) (lines []string, err error) {
	var at unix.Statfs_t
	groups := unix.Statfs(dir, &at) == nil && at.Type == unix.CGROUP2_SUPER_MAGIC
	err = filepath.WalkDir(dir, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return ignoreMissing(err)
		}
		if groups && !d.IsDir() {
			return nil
		}
		info, err := d.Info()
		if err != nil {
			return ignoreMissing(err)
		}
		line := info.Mode().String() + " " + path
		if info.Mode().IsRegular() {
			line += fmt.Sprintf(" %d", info.Size())
		}
		lines = append(lines, line)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("netns: listing %s: %w", dir, err)
	}
	return lines, nil
}

func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
