package stories

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// attackerEnv makes the test binary an attacker: first a user without any
// privilege, then root in user and network namespaces of that user's own.
const attackerEnv = "KASWAY_STORIES_ATTACKER"

// attackerUID is a user of the machine that nobody else is.
const attackerUID = 47110

// attempt is one thing that an attacker tries.
type attempt struct {
	// Exec runs a command with Input.
	Exec  []string `json:",omitempty"`
	Input string   `json:",omitempty"`
	// To is dialled, from From and with Mark where given; Say is sent, and a
	// line waited for.
	To, From netip.AddrPort
	Mark     int    `json:",omitempty"`
	Say      string `json:",omitempty"`
	// Load loads a BPF program.
	Load bool `json:",omitempty"`
}

// outcome is what became of it.
type outcome struct {
	Out   string
	Error string
	Errno syscall.Errno
}

func (o outcome) ok() bool { return o.Error == "" }

// attackerMain is the attacker's process.
func attackerMain(stage string) int {
	if stage == "user" {
		cmd := exec.Command("/proc/self/exe")
		cmd.Env = append(os.Environ(), attackerEnv+"=root")
		cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
		id := []syscall.SysProcIDMap{{ContainerID: 0, HostID: attackerUID, Size: 1}}
		cmd.SysProcAttr = &syscall.SysProcAttr{
			Cloneflags: syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET, UidMappings: id, GidMappings: id, Pdeathsig: syscall.SIGKILL,
		}
		if err := cmd.Run(); err != nil {
			fmt.Fprintln(os.Stderr, "attacker:", err)
			return 1
		}
		return 0
	}
	out := json.NewEncoder(os.Stdout)
	if err := out.Encode(os.Getpid()); err != nil {
		return 1
	}
	in := json.NewDecoder(os.Stdin)
	for {
		var a attempt
		if err := in.Decode(&a); err != nil {
			return 0
		}
		if err := out.Encode(a.make()); err != nil {
			return 1
		}
	}
}

func (a attempt) make() (o outcome) {
	var err error
	switch {
	case len(a.Exec) > 0:
		var b bytes.Buffer
		cmd := exec.Command(a.Exec[0], a.Exec[1:]...)
		cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(a.Input), &b, &b
		err = cmd.Run()
		o.Out = b.String()
	case a.Load:
		err = loadProgram()
	default:
		o.Out, err = a.dial()
	}
	if err != nil {
		o.Error = err.Error()
		errors.As(err, &o.Errno)
	}
	return o
}

// loadProgram is the first step to a hook on anybody's connects.
func loadProgram() error {
	p, err := ebpf.NewProgram(&ebpf.ProgramSpec{
		Type: ebpf.CGroupSockAddr, AttachType: ebpf.AttachCGroupInet4Connect, License: "GPL",
		Instructions: asm.Instructions{asm.Mov.Imm(asm.R0, 1), asm.Return()},
	})
	if err != nil {
		return err
	}
	return p.Close()
}

func (a attempt) dial() (string, error) {
	d := net.Dialer{Timeout: 2 * time.Second}
	if a.From.IsValid() {
		d.LocalAddr = net.TCPAddrFromAddrPort(a.From)
	}
	if a.Mark != 0 {
		d.Control = func(_, _ string, c syscall.RawConn) (err error) {
			cerr := c.Control(func(fd uintptr) { err = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_MARK, a.Mark) })
			return errors.Join(cerr, err)
		}
	}
	c, err := d.Dial("tcp", a.To.String())
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(5 * time.Second)); err != nil {
		return "", err
	}
	if _, err := io.WriteString(c, a.Say+"\n"); err != nil {
		return "", err
	}
	line, err := bufio.NewReader(c).ReadString('\n')
	return strings.TrimSpace(line), err
}

// attacker is a pod of the node whose process is root in user and network
// namespaces of its own, which is all that it needs to do there what it likes.
type attacker struct {
	addr netip.Addr
	in   *json.Encoder
	out  *json.Decoder
}

// newAttacker puts one into the cgroup of a pod, with an interface to the node
// as routed pods have it.
func (s *scene) newAttacker(t *testing.T, pod *netns.Host, addr netip.Addr) *attacker {
	t.Helper()
	c := pod.Command("/proc/self/exe")
	c.Env = append(os.Environ(), attackerEnv+"=user")
	c.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: attackerUID, Gid: attackerUID}}
	var log stack.Log
	c.Stderr = &log
	stdin, err := c.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := c.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		shut(stdin) // it ends with its input
		_ = c.Wait()
	})
	a := &attacker{addr: addr, in: json.NewEncoder(stdin), out: json.NewDecoder(stdout)}
	var pid int
	if err := a.out.Decode(&pid); err != nil {
		t.Fatalf("the attacker does not start: %v\n%s", err, log.String())
	}
	s.plug(t, a, pid)
	return a
}

// plug joins the attacker's namespace to the node, as routed pods are.
func (s *scene) plug(t *testing.T, a *attacker, pid int) {
	t.Helper()
	const dev = "calievil"
	attrs := netlink.NewLinkAttrs()
	attrs.Name = dev
	nl := s.Node.Netlink()
	if err := nl.LinkAdd(&netlink.Veth{LinkAttrs: attrs, PeerName: netns.Uplink, PeerNamespace: netlink.NsPid(pid)}); err != nil {
		t.Fatal(err)
	}
	link, err := nl.LinkByName(dev)
	if err == nil {
		err = errors.Join(nl.LinkSetUp(link), s.Node.AddRoute(netip.PrefixFrom(a.addr, 32), netip.Addr{}, dev))
	}
	if err != nil {
		t.Fatal(err)
	}
	gateway := "169.254.1.1"
	a.must(t, "ip", "link", "set", "lo", "up")
	a.must(t, "ip", "link", "set", netns.Uplink, "up")
	a.must(t, "ip", "address", "add", a.addr.String()+"/32", "dev", netns.Uplink)
	a.must(t, "ip", "route", "add", gateway, "dev", netns.Uplink)
	a.must(t, "ip", "neighbour", "add", gateway, "lladdr", link.Attrs().HardwareAddr.String(), "dev", netns.Uplink, "nud", "permanent")
	a.must(t, "ip", "route", "add", "default", "via", gateway)
}

// try makes the attempt.
func (a *attacker) try(t *testing.T, what attempt) (o outcome) {
	t.Helper()
	err := a.in.Encode(what)
	if err == nil {
		err = a.out.Decode(&o)
	}
	if err != nil {
		t.Fatalf("the attacker has ended: %v", err)
	}
	return o
}

func (a *attacker) run(t *testing.T, name string, args ...string) outcome {
	t.Helper()
	return a.try(t, attempt{Exec: append([]string{name}, args...)})
}

// must fails the test unless the attacker may do that.
func (a *attacker) must(t *testing.T, name string, args ...string) {
	t.Helper()
	if o := a.run(t, name, args...); !o.ok() {
		t.Fatalf("the attacker may not even do this to itself: %s %q: %s: %s", name, args, o.Error, o.Out)
	}
}
