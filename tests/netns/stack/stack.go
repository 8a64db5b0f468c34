// Package stack runs the real binaries in a topology: a kasway-server in the
// control plane and a kasway-agent on the node, with certificates of their own.
package stack

import (
	"errors"
	"fmt"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/tests/netns"
)

// Port is where the server listens for agents.
const Port = 8091

// Where operators look, on the node and in the control plane.
const (
	AgentOperators  = "127.0.0.1:8094"
	ServerOperators = "127.0.0.1:8095"
)

// Stack is a topology with the binaries of one folder. It is used by one
// goroutine at a time.
type Stack struct {
	*netns.Topology
	// Dir holds certificates, sockets and state; the caller removes it.
	Dir string
	// Authority has signed the certificates of both sides.
	Authority *certs.Authority
	// Hosts is the file that both binaries have for /etc/hosts; empty: the
	// machine's.
	Hosts string
	// AgentCgroup is where on the node agents run: netns.AgentUnit, until a test
	// sets another.
	AgentCgroup string
	// Under is a command that runs the agent's binary, which it is given with its
	// arguments: to take something away. Empty: none.
	Under []string
	// At is where the agent looks for the server.
	At netip.AddrPort
	// Processes are all that were started, the ended ones too.
	Processes []*Process
	bin       string
}

// New makes certificates and starts nothing yet. bin is the folder of
// kasway-agent and kasway-server.
func New(t *netns.Topology, bin, dir string) (*Stack, error) {
	const validity = 24 * time.Hour
	authority, err := certs.NewAuthority("the stack's CA", validity)
	if err != nil {
		return nil, err
	}
	addresses := append([]netip.Addr{t.ControlPlane.Addr4, t.ControlPlane.Addr6}, t.Plan.KAS...)
	server, err := authority.IssueServer(certs.ServerRequest{IPs: addresses, Validity: validity})
	if err != nil {
		return nil, err
	}
	agent, err := authority.IssueAgent(certs.AgentRequest{Name: "node", TrustDomain: "kasway", Validity: validity})
	if err != nil {
		return nil, err
	}
	s := &Stack{Topology: t, Dir: dir, Authority: authority, AgentCgroup: netns.AgentUnit,
		At: netip.AddrPortFrom(t.ControlPlane.Addr4, Port), bin: bin}
	_, err = s.Save("ca", authority.Pair)
	for name, pair := range map[string]certs.Pair{"server": server, "agent-node": agent} {
		_, serr := s.Save(name, pair)
		err = errors.Join(err, serr)
	}
	return s, err
}

// Save puts a certificate and its key into the stack's folder and returns the
// path of both without .crt and .key.
func (s *Stack) Save(name string, p certs.Pair) (path string, err error) {
	_, _, err = certs.Save(s.Path("pki"), name, p, true)
	return s.Path("pki/" + name), err
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

// Path is that of a file in the stack's folder.
func (s *Stack) Path(name string) string { return filepath.Join(s.Dir, name) }

// Server starts a server in the control plane that reaches the KAS at upstream
// (empty: where more says); more flags may follow, the last of a kind wins. It
// returns when the server accepts agents.
func (s *Stack) Server(upstream string, more ...string) (*Process, error) {
	p, err := s.ServerUnready(upstream, more...)
	if err != nil {
		return nil, err
	}
	return p, s.settle(p)
}

// ServerUnready is Server without waiting.
func (s *Stack) ServerUnready(upstream string, more ...string) (*Process, error) {
	args := append([]string{"run"}, s.ServerFlags()...)
	if upstream != "" {
		args = append(args, "--allowed-destination", upstream)
	}
	return s.start(s.ControlPlane, "server", ServerOperators, append(args, more...))
}

// ServerFlags are those that every server of the stack has.
func (s *Stack) ServerFlags() []string {
	return []string{
		"--listen", fmt.Sprintf(":%d", Port),
		"--cert", s.Path("pki/server.crt"), "--key", s.Path("pki/server.key"), "--ca", s.Path("pki/ca.crt"),
		"--admin-socket", s.Path("server.sock"), "--observe-address", ServerOperators,
	}
}

// Agent starts an agent on the node; args are flags besides those for the
// server, the credentials, the socket and the state. It returns when the agent
// is ready.
func (s *Stack) Agent(args ...string) (*Process, error) {
	p, err := s.AgentUnready(args...)
	if err != nil {
		return nil, err
	}
	return p, s.settle(p)
}

// AgentUnready is Agent without waiting.
func (s *Stack) AgentUnready(args ...string) (*Process, error) {
	return s.start(s.Node, "agent", AgentOperators, append(append([]string{"run"}, s.AgentFlags()...), args...))
}

// AgentFlags are those that every agent of the stack has. Nothing of an agent is
// attached above the node's own cgroup: the rest of the machine is not its node.
func (s *Stack) AgentFlags() []string {
	cgroup := s.NodeCgroup()
	if cgroup == "" {
		cgroup = "auto"
	}
	return []string{
		"--cgroup", cgroup,
		"--server", s.At.String(),
		"--cert", s.Path("pki/agent-node.crt"), "--key", s.Path("pki/agent-node.key"), "--ca", s.Path("pki/ca.crt"),
		"--admin-socket", s.Path("agent.sock"), "--state-dir", s.Path("state"), "--observe-address", AgentOperators,
	}
}

// settle waits until p is ready, or has ended.
func (s *Stack) settle(p *Process) error {
	ended := make(chan error, 1)
	go func() { ended <- p.Wait() }()
	err := netns.Poll(30*time.Second, func() error {
		select {
		case err := <-ended:
			ended <- err
			return nil
		default:
			return p.Ready()
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

// Ready is nil if the process says that it is ready.
func (p *Process) Ready() error {
	resp, err := observe.SocketClient(p.Socket).Get("http://process/readyz")
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusOK {
		return errors.New(resp.Status)
	}
	return nil
}

// Run runs a command of the agent's binary on the node and returns its output.
func (s *Stack) Run(args ...string) (string, error) {
	var stdout, stderr strings.Builder
	cmd := s.command(s.Node, "agent", args)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return stdout.String(), fmt.Errorf("%s: %w: %s", cmd, err, strings.TrimSpace(stderr.String()))
	}
	return stdout.String(), nil
}

// Cleanup runs the agent's cleanup.
func (s *Stack) Cleanup() error {
	_, err := s.Run(s.CleanupArgs()...)
	return err
}

// CleanupArgs are the arguments of a cleanup after the stack's agents.
func (s *Stack) CleanupArgs() []string {
	return []string{"cleanup", "--state-dir", s.Path("state"), "--admin-socket", s.Path("agent.sock")}
}

// TempDir makes a short-named folder: paths of UNIX sockets end at 107 bytes.
func TempDir() (string, error) { return os.MkdirTemp("", "kasway-") }
