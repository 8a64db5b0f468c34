// Package stack runs the real binaries in a topology: a kasway-server in the
// control plane and a kasway-agent on the node, with certificates of their own.
package stack

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// Port is where the server listens for agents.
const Port = 8091

// Stack is a topology with the binaries of one folder. It is used by one
// goroutine at a time.
type Stack struct {
	*netns.Topology
	// Dir holds certificates, sockets, state and logs; the caller removes it.
	Dir string
	bin string
}

// New makes certificates and starts nothing yet. bin is the folder of
// kasway-agent and kasway-server.
func New(t *netns.Topology, bin, dir string) (*Stack, error) {
	s := &Stack{Topology: t, Dir: dir, bin: bin}
	pki := s.path("pki")
	for _, args := range [][]string{
		{"init", "--dir", pki},
		{"server", "--dir", pki, "--ip", t.ControlPlane.Addr4.String(), "--ip", t.ControlPlane.Addr6.String()},
		{"agent", "--dir", pki, "--name", "node"},
	} {
		if out, err := exec.Command(s.binary("server"), append([]string{"certs"}, args...)...).CombinedOutput(); err != nil {
			return nil, fmt.Errorf("kasway-server certs %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return s, nil
}

// Build builds both binaries into dir, for tests; a second call is cheap.
func Build(dir string, race bool) error {
	for _, b := range []string{"agent", "server"} {
		args := []string{"build", "-trimpath", "-o", filepath.Join(dir, "kasway-"+b)}
		if race {
			args = append(args, "-race")
		}
		cmd := exec.Command("go", append(args, "github.com/kasway/kasway/cmd/"+b)...)
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", cmd, err, out)
		}
	}
	return nil
}

func (s *Stack) binary(name string) string { return filepath.Join(s.bin, "kasway-"+name) }

func (s *Stack) path(name string) string { return filepath.Join(s.Dir, name) }

// Process is one running binary.
type Process struct {
	*netns.Cmd
	// Socket is its admin socket.
	Socket string
	log    *Log
}

// Log is what the process has written so far.
func (p *Process) Log() string { return p.log.String() }

// Log keeps what a process writes. It is safe for concurrent use.
type Log struct {
	mu   sync.Mutex
	text strings.Builder
}

// Write implements io.Writer.
func (l *Log) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *Log) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}

// start runs a binary on h until the lab closes or somebody ends it.
func (s *Stack) start(h *netns.Host, name, cgroup string, args []string) (*Process, error) {
	p := &Process{Cmd: h.Command(s.binary(name), args...).Cgroup(cgroup), log: &Log{}}
	p.Stdout, p.Stderr = p.log, p.log
	for i, a := range args {
		if a == "--admin-socket" {
			p.Socket = args[i+1]
		}
	}
	return p, p.Start()
}

// Server starts a server in the control plane that reaches the KAS at upstream;
// more flags may follow. It returns when the server accepts agents.
func (s *Stack) Server(upstream string, more ...string) (*Process, error) {
	args := append([]string{"run", "--listen", fmt.Sprintf(":%d", Port),
		"--cert", s.path("pki/server.crt"), "--key", s.path("pki/server.key"), "--ca", s.path("pki/ca.crt"),
		"--allowed-destination", upstream, "--admin-socket", s.path("server.sock")}, more...)
	p, err := s.start(s.ControlPlane, "server", "server", args)
	if err != nil {
		return nil, err
	}
	return p, s.settle(p, func() error {
		c, err := s.ControlPlane.Dial(context.Background(), "tcp", fmt.Sprintf("127.0.0.1:%d", Port))
		if err != nil {
			return err
		}
		return c.Close()
	})
}

// Agent starts an agent on the node; args are flags besides those for the
// server, the credentials, the socket and the state. It returns when the agent
// is ready.
func (s *Stack) Agent(args ...string) (*Process, error) {
	p, err := s.AgentUnready(args...)
	if err != nil {
		return nil, err
	}
	return p, s.settle(p, func() error {
		_, err := s.Node.Run(s.binary("agent"), "status", "--ready", "--admin-socket", p.Socket)
		return err
	})
}

// AgentUnready is Agent without waiting.
func (s *Stack) AgentUnready(args ...string) (*Process, error) {
	return s.start(s.Node, "agent", "agent", append(append([]string{"run"}, s.AgentFlags()...), args...))
}

// AgentFlags are those that every agent of the stack has.
func (s *Stack) AgentFlags() []string {
	return []string{
		"--server", netip.AddrPortFrom(s.ControlPlane.Addr4, Port).String(),
		"--cert", s.path("pki/agent-node.crt"), "--key", s.path("pki/agent-node.key"), "--ca", s.path("pki/ca.crt"),
		"--admin-socket", s.path("agent.sock"), "--state-dir", s.path("state"), "--observe-address", "127.0.0.1:8094",
	}
}

// settle waits until ready is nil, or the process has ended.
func (s *Stack) settle(p *Process, ready func() error) error {
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	err := netns.Poll(15*time.Second, func() error {
		select {
		case err := <-ended:
			ended <- err
			return nil
		default:
			return ready()
		}
	})
	select {
	case werr := <-ended:
		return fmt.Errorf("%s ended: %w\n%s", p, werr, p.Log())
	default:
	}
	if err != nil {
		return fmt.Errorf("%s does not become ready: %w\n%s", p, err, p.Log())
	}
	return nil
}

// Run runs a command of the agent's binary on the node and returns its output.
func (s *Stack) Run(args ...string) (string, error) {
	return s.Node.Run(s.binary("agent"), args...)
}

// Cleanup runs the agent's cleanup.
func (s *Stack) Cleanup() error {
	_, err := s.Run("cleanup", "--state-dir", s.path("state"), "--admin-socket", s.path("agent.sock"))
	return err
}

// Mirror serves a stand-in for anything on the addresses of h: it answers each
// line with the address that it sees the client come from, a space, and the
// line. It stops when the listeners are closed by stop.
func Mirror(h *netns.Host, at ...netip.AddrPort) (stop func(), err error) {
	var (
		wg        sync.WaitGroup
		listeners []net.Listener
	)
	stop = func() {
		for _, l := range listeners {
			_ = l.Close()
		}
		wg.Wait()
	}
	for _, a := range at {
		l, err := h.Listen("tcp", a.String())
		if err != nil {
			stop()
			return nil, err
		}
		listeners = append(listeners, l)
		wg.Go(func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				wg.Go(func() { mirror(c) })
			}
		})
	}
	return stop, nil
}

func mirror(c net.Conn) {
	defer c.Close()
	for {
		// A peer that neither speaks nor ends is not waited for.
		if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
			return
		}
		line, err := readLine(c)
		if err != nil {
			return
		}
		if _, err := fmt.Fprintf(c, "%s %s\n", c.RemoteAddr(), line); err != nil {
			return
		}
	}
}

// AskMirror sends a line and returns who the far side says is speaking.
func AskMirror(c net.Conn, line string, timeout time.Duration) (netip.AddrPort, error) {
	if err := c.SetDeadline(time.Now().Add(timeout)); err != nil {
		return netip.AddrPort{}, err
	}
	if _, err := io.WriteString(c, line+"\n"); err != nil {
		return netip.AddrPort{}, err
	}
	answer, err := readLine(c)
	if err != nil {
		return netip.AddrPort{}, err
	}
	who, said, _ := strings.Cut(answer, " ")
	if said != line {
		return netip.AddrPort{}, fmt.Errorf("the far side answers %q, not %q", said, line)
	}
	return netip.ParseAddrPort(who)
}

// readLine reads byte by byte: nothing behind the line is taken.
func readLine(r io.Reader) (string, error) {
	var line []byte
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return string(line), nil
		}
		if line = append(line, b[0]); len(line) > 1024 {
			return "", errors.New("a line of more than 1024 bytes")
		}
	}
}

// TempDir makes a short-named folder: paths of UNIX sockets end at 107 bytes.
func TempDir() (string, error) { return os.MkdirTemp("", "kasway-") }
