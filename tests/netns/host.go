package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"

	"github.com/vishvananda/netlink"
	vns "github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// Host is one network namespace. Its methods may be called concurrently.
type Host struct {
	// Label is its name within the lab, such as "node".
	Label string
	// Addr4 and Addr6 are its own addresses, where it was given some.
	Addr4, Addr6 netip.Addr

	// PodUID and ContainerID are those of a pod, as its cgroups name them.
	PodUID, ContainerID string

	lab *Lab
	ns  vns.NsHandle
	nl  *netlink.Handle
	// base is the cgroup of the host below the lab's, clients that of its
	// clients below base.
	base, clients string

	callerMu sync.Mutex
	calls    *caller
}

// Host adds a namespace with lo up and without duplicate address detection. It
// is a machine: its clients run in KubeletUnit.
func (l *Lab) Host(label string) (*Host, error) {
	return l.newHost(label, func(h *Host) error { return h.livesIn(label, KubeletUnit) })
}

// newHost adds a namespace, and cgroups by place.
func (l *Lab) newHost(label string, place func(*Host) error) (*Host, error) {
	name := l.Name + "-" + label
	var ns vns.NsHandle
	err := onThread(func() (err error) {
		ns, err = vns.NewNamed(name)
		return err
	})
	if err != nil {
		return nil, fmt.Errorf("netns: making %s: %w", name, err)
	}
	h := &Host{Label: label, lab: l, ns: ns}
	l.mu.Lock()
	l.hosts = append(l.hosts, h)
	l.mu.Unlock()
	if h.nl, err = netlink.NewHandleAt(ns); err != nil {
		return nil, fmt.Errorf("netns: netlink in %s: %w", name, err)
	}
	for _, s := range []string{"all", "default"} {
		err = errors.Join(err,
			h.Sysctl("net/ipv6/conf/"+s+"/accept_dad", "0"),
			h.Sysctl("net/ipv6/conf/"+s+"/dad_transmits", "0"),
			h.Sysctl("net/ipv6/conf/"+s+"/accept_ra", "0"),
			h.Sysctl("net/ipv4/conf/"+s+"/rp_filter", "0"))
	}
	return h, errors.Join(err, h.up("lo"), place(h))
}

// Path is the file that names the namespace, for nsenter --net=.
func (h *Host) Path() string { return filepath.Join(netnsDir, h.lab.Name+"-"+h.Label) }

// Netlink is a handle whose requests act on this namespace.
func (h *Host) Netlink() *netlink.Handle { return h.nl }

func (h *Host) close() error {
	if h.nl != nil {
		h.nl.Close()
	}
	h.callerMu.Lock()
	defer h.callerMu.Unlock()
	var err error
	if h.calls != nil {
		err = h.calls.close()
	}
	return errors.Join(err, h.ns.Close())
}

// Do runs f on a thread of its own inside the namespace, and returns when f
// has. Sockets and child processes that f makes belong to the namespace for
// ever; goroutines that f starts do not.
func (h *Host) Do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(h.ns), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("netns: entering %s: %w", h.Label, err)
		}
		return f()
	})
}

// onThread runs f on a thread that is thrown away afterwards, and never the
// first one: /proc/self must go on to mean the machine's own namespace.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlock: the thread ends with the goroutine
		if unix.Gettid() == os.Getpid() {
			// While this goroutine keeps the first thread, the next one gets another.
			err := onThread(f)
			runtime.UnlockOSThread()
			done <- err
			return
		}
		// A test's FailNow ends the goroutine without a result.
		err := errors.New("netns: the function ended its goroutine")
		defer func() { done <- err }()
		err = f()
	}()
	return <-done
}

// Listen opens a listener in the namespace.
func (h *Host) Listen(network, address string) (l net.Listener, err error) {
	err = h.Do(func() (err error) {
		// Plain TCP: an MPTCP listener would hide what is on the wire.
		lc := net.ListenConfig{}
		lc.SetMultipathTCP(false)
		l, err = lc.Listen(context.Background(), network, address)
		return err
	})
	return l, err
}

// Sysctl sets /proc/sys/<name> of the namespace; name is "net/...".
func (h *Host) Sysctl(name, value string) error {
	return h.Do(func() error {
		if err := os.WriteFile("/proc/sys/"+name, []byte(value), 0); err != nil {
			return fmt.Errorf("netns: sysctl in %s: %w", h.Label, err)
		}
		return nil
	})
}

// Run runs a command in the namespace and returns its standard output. The
// error holds its standard error.
func (h *Host) Run(name string, args ...string) (string, error) {
	return h.RunInput("", name, args...)
}

// RunInput is Run with a standard input.
func (h *Host) RunInput(input, name string, args ...string) (string, error) {
	cmd := h.Command(name, args...)
	var stdout, stderr strings.Builder
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(input), &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("netns: %s in %s: %w: %s", cmd, h.Label, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}
