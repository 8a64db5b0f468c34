package stack

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"

	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/tests/netns"
)

// Process is one running binary.
type Process struct {
	*netns.Cmd
	// Name is "agent" or "server".
	Name string
	// Socket is its admin socket.
	Socket    string
	host      *netns.Host
	operators string
	log       *Log
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

// ownHosts runs a command, $1 and on, that sees the file $0 as /etc/hosts.
const ownHosts = `mount --bind "$0" /etc/hosts && exec "$@"`

// command prepares a binary. An agent has the lab's own bpffs, so that what it
// pins is nowhere on the machine, and outlives it.
func (s *Stack) command(h *netns.Host, name string, args []string) *netns.Cmd {
	cmd := h.Command(s.binary(name), args...)
	if s.Hosts != "" {
		cmd = h.Command("unshare", append([]string{"--mount", "sh", "-c", ownHosts, s.Hosts, s.binary(name)}, args...)...)
	}
	if name == "agent" {
		if len(s.Under) > 0 {
			cmd = h.Command(s.Under[0], slices.Concat(s.Under[1:], cmd.Args)...)
		}
		return cmd.Cgroup(s.AgentCgroup).BPFFS()
	}
	return cmd.Cgroup("system.slice/kasway-" + name + ".service")
}

// start runs a binary on h until the lab closes or somebody ends it.
func (s *Stack) start(h *netns.Host, name, operators string, args []string) (*Process, error) {
	p := &Process{Cmd: s.command(h, name, args), Name: name, host: h, operators: operators, log: &Log{}}
	p.Stdout, p.Stderr = p.log, p.log
	for i, a := range args {
		if a == "--admin-socket" {
			p.Socket = args[i+1]
		}
	}
	s.Processes = append(s.Processes, p)
	return p, p.Start()
}

// Exit runs a binary ("agent" on the node, "server" in the control plane) to
// its end and returns its exit code and all that it has written.
func (s *Stack) Exit(binary string, args ...string) (code int, output string, err error) {
	h := s.Node
	if binary == "server" {
		h = s.ControlPlane
	}
	return ExitOf(s.command(h, binary, args))
}

// ExitOf runs c to its end and returns its exit code and all that it has
// written.
func ExitOf(c *netns.Cmd) (code int, output string, err error) {
	var log Log
	c.Stdout, c.Stderr = &log, &log
	err = c.Run()
	var exit *exec.ExitError
	if errors.As(err, &exit) {
		err = nil
	}
	if c.ProcessState != nil {
		code = c.ProcessState.ExitCode()
	}
	return code, log.String(), err
}

// Binary is the path of a binary, "agent" or "server".
func (s *Stack) Binary(name string) string { return s.binary(name) }

// Usage is what a process holds that must not grow: open files by what they
// are, and goroutines.
type Usage struct {
	Descriptors []string
	Goroutines  int
}

// Exceeds reports whether u is more than base in anything.
func (u Usage) Exceeds(base Usage) bool {
	return len(u.Descriptors) > len(base.Descriptors) || u.Goroutines > base.Goroutines
}

// Usage looks at the process; the look itself is part of what it sees.
func (p *Process) Usage() (u Usage, err error) {
	dir := fmt.Sprintf("/proc/%d/fd/", p.Process.Pid)
	fds, err := os.ReadDir(dir)
	if err != nil {
		return u, err
	}
	for _, fd := range fds {
		if what, err := os.Readlink(dir + fd.Name()); err == nil {
			u.Descriptors = append(u.Descriptors, what)
		}
	}
	err = each(observe.SocketClient(p.Socket), "/debug/pprof/goroutine?debug=1", func(line string) error {
		if n, ok := strings.CutPrefix(line, "goroutine profile: total "); ok {
			u.Goroutines, err = strconv.Atoi(n)
		}
		return err
	})
	return u, err
}

// Metrics are the samples that the process shows on its operators' port, by
// name and labels as they stand there.
func (p *Process) Metrics() (map[string]float64, error) {
	c := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return p.host.Dial(ctx, network, p.operators)
		},
	}}
	samples := map[string]float64{}
	return samples, each(c, "/metrics", func(line string) error {
		i := strings.LastIndexByte(line, ' ')
		if i < 0 || line[0] == '#' {
			return nil
		}
		v, err := strconv.ParseFloat(line[i+1:], 64)
		samples[line[:i]] = v
		return err
	})
}

// each gets a page and calls f for its lines.
func each(c *http.Client, path string, f func(line string) error) error {
	resp, err := c.Get("http://process" + path)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return fmt.Errorf("%s: %s", path, resp.Status)
	}
	lines := bufio.NewScanner(resp.Body)
	for lines.Scan() {
		if err := f(lines.Text()); err != nil {
			return fmt.Errorf("%s: %w", path, err)
		}
	}
	return lines.Err()
}
