package intercept

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// Files in the state directory.
const (
	node6File     = "node-ipv6"
	addressesFile = "node-addresses.json"
)

// addressMemory is what outlives the process.
type addressMemory struct {
	// Added are the addresses that we have put on lo.
	Added []netip.Addr `json:"added"`
	// MadeDir says that the directory was not there before us.
	MadeDir bool `json:"madeDir,omitempty"`
}

func (m addressMemory) owns(a netip.Addr) bool { return slices.Contains(m.Added, a) }

type addressState struct{ dir string }

func (s addressState) load() (addressMemory, error) {
	var m addressMemory
	path := filepath.Join(s.dir, addressesFile)
	b, err := os.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return m, nil
	}
	if err != nil {
		return m, fmt.Errorf("reading what addresses are ours: %w", err)
	}
	if err := json.Unmarshal(b, &m); err != nil {
		return m, fmt.Errorf("%s: %w: remove the file if nothing of it can be saved", path, err)
	}
	return m, nil
}

func (s addressState) add(a netip.Addr) error {
	made, err := s.makeDir()
	if err != nil {
		return err
	}
	m, err := s.load()
	if err != nil {
		return err
	}
	if m.MadeDir = m.MadeDir || made; !m.owns(a) {
		m.Added = append(m.Added, a)
	}
	return s.save(m)
}

func (s addressState) save(m addressMemory) error {
	b, err := json.Marshal(m)
	if err != nil {
		return fmt.Errorf("remembering addresses: %w", err)
	}
	return s.write(addressesFile, append(b, '\n'))
}

// makeDir reports whether it had to make the directory.
func (s addressState) makeDir() (made bool, err error) {
	if _, err := os.Stat(s.dir); err == nil {
		return false, nil
	}
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return false, fmt.Errorf("making the state directory: %w", err)
	}
	return true, nil
}

// lockLook is how often it is looked whether another agent has let go.
const lockLook = 10 * time.Millisecond

// Lock keeps the other agents that have this state directory from installing
// anything until unlock is called, or this process ends. It fails when ctx ends
// first, and where there can be no such directory.
func (n *NodeAddresses) Lock(ctx context.Context) (unlock func(), err error) {
	made, err := n.state.makeDir()
	if err == nil && made {
		err = n.state.save(addressMemory{MadeDir: true})
	}
	if err != nil {
		return nil, err
	}
	dir, err := os.Open(n.state.dir)
	if err != nil {
		return nil, fmt.Errorf("locking the state directory: %w", err)
	}
	for {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return func() { _ = dir.Close() }, nil // which unlocks
		}
		if !errors.Is(err, unix.EWOULDBLOCK) && !errors.Is(err, unix.EINTR) {
			return nil, errors.Join(fmt.Errorf("locking the state directory: %w", os.NewSyscallError("flock", err)), dir.Close())
		}
		select {
		case <-time.After(lockLook):
		case <-ctx.Done():
			return nil, errors.Join(fmt.Errorf("locking the state directory: another agent has it: %w", ctx.Err()), dir.Close())
		}
	}
}

// write replaces a file of the directory, so that a crash, of the machine too,
// leaves the old or the new one: an agent does not start with half a memory.
func (s addressState) write(name string, b []byte) error {
	path := filepath.Join(s.dir, name)
	err := writeSynced(path+".new", b)
	if err == nil {
		err = os.Rename(path+".new", path)
	}
	if err != nil {
		return fmt.Errorf("writing the state: %w", err)
	}
	return nil
}

func writeSynced(path string, b []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// remove forgets everything; the directory stays unless we have made it and
// nobody else uses it.
func (s addressState) remove(m addressMemory) error {
	for _, f := range []string{node6File, addressesFile, node6File + ".new", addressesFile + ".new"} {
		if err := os.Remove(filepath.Join(s.dir, f)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("removing the state: %w", err)
		}
	}
	if m.MadeDir {
		// It is not empty while another part of the agent keeps something there.
		_ = os.Remove(s.dir)
	}
	return nil
}

// ourInterfaceID ends every IPv6 address that we choose: "kasway".
var ourInterfaceID = [8]byte{0, 0, 'k', 'a', 's', 'w', 'a', 'y'}

// isOurULA tells an address of Node6's making.
func isOurULA(a netip.Addr) bool {
	b := a.As16()
	return a.Is6() && b[0] == 0xfd && [8]byte(b[8:]) == ourInterfaceID
}

// Node6 is the node's own unique local address: a random one is chosen the
// first time and kept in the state directory. It is the zero Addr, without an
// error, on a host without IPv6.
func (n *NodeAddresses) Node6() (netip.Addr, error) {
	if !HasIPv6() {
		return netip.Addr{}, nil
	}
	path := filepath.Join(n.state.dir, node6File)
	b, err := os.ReadFile(path)
	if err == nil {
		a, err := netip.ParseAddr(strings.TrimSpace(string(b)))
		if err != nil || !a.Is6() {
			return netip.Addr{}, fmt.Errorf("%s does not hold an IPv6 address: remove the file, and another is chosen", path)
		}
		return a, nil
	}
	if !errors.Is(err, fs.ErrNotExist) {
		return netip.Addr{}, fmt.Errorf("reading the node's IPv6 address: %w", err)
	}
	var raw [16]byte
	_, _ = rand.Read(raw[:6]) // never fails
	raw[0] = 0xfd             // RFC 4193: locally assigned, 40 random bits
	copy(raw[8:], ourInterfaceID[:])
	a := netip.AddrFrom16(raw)
	made, err := n.state.makeDir()
	if err != nil {
		return netip.Addr{}, err
	}
	if made {
		if err := n.state.save(addressMemory{MadeDir: true}); err != nil {
			return netip.Addr{}, err
		}
	}
	return a, n.state.write(node6File, []byte(a.String()+"\n"))
}
