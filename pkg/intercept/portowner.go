package intercept

import (
	"bufio"
	"encoding/hex"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// portOwner finds the process that listens on at, or on every address at its
// port. It sees only processes of its own pid namespace that it may look into;
// ok is false if none of those is it.
func portOwner(at netip.AddrPort) (pid int, name string, ok bool) {
	for _, table := range []string{"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"} {
		for _, inode := range listeningInodes(table, at) {
			if pid, ok := inodeOwner(inode); ok {
				comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
				if err != nil {
					continue
				}
				return pid, strings.TrimSpace(string(comm)), true
			}
		}
	}
	return 0, "", false
}

// listeningInodes are the sockets of table that keep others from listening on
// at, which may be every address.
func listeningInodes(table string, at netip.AddrPort) []string {
	const stateListen = "0A"
	f, err := os.Open(table)
	if err != nil {
		return nil // no such family
	}
	defer f.Close()
	var inodes []string
	for lines := bufio.NewScanner(f); lines.Scan(); {
		// sl local_address rem_address st tx:rx tr:when retrnsmt uid timeout inode
		fields := strings.Fields(lines.Text())
		if len(fields) < 10 || fields[3] != stateListen {
			continue
		}
		local, err := parseProcAddr(fields[1])
		if err != nil || local.Port() != at.Port() {
			continue
		}
		every := !at.Addr().IsValid() || at.Addr().IsUnspecified()
		if every || local.Addr() == at.Addr() || local.Addr().IsUnspecified() {
			inodes = append(inodes, fields[9])
		}
	}
	return inodes
}

// parseProcAddr reads "0100007F:192B": 32-bit words in the machine's byte
// order, which is little-endian on everything Kasway is built for, then the
// port as a number.
func parseProcAddr(s string) (netip.AddrPort, error) {
	words, port, ok := strings.Cut(s, ":")
	raw, err := hex.DecodeString(words)
	if !ok || err != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, fmt.Errorf("not an address: %q", s)
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4])
	}
	addr, ok := netip.AddrFromSlice(raw)
	p, err := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil {
		return netip.AddrPort{}, fmt.Errorf("not an address: %q", s)
	}
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), nil
}

// inodeOwner is the process that holds the socket of that inode.
func inodeOwner(inode string) (pid int, ok bool) {
	links, err := filepath.Glob("/proc/[0-9]*/fd/*")
	if err != nil {
		return 0, false
	}
	for _, l := range links {
		if to, err := os.Readlink(l); err == nil && to == "socket:["+inode+"]" {
			pid, err := strconv.Atoi(strings.Split(l, "/")[2])
			return pid, err == nil
		}
	}
	return 0, false
}
