package stories

import (
	"fmt"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// serviceManager hears what processes tell it, as systemd does.
type serviceManager struct {
	at string

	mu    sync.Mutex
	heard []string
}

func newServiceManager(t *testing.T, dir string) *serviceManager {
	t.Helper()
	m := &serviceManager{at: filepath.Join(dir, "notify")}
	c, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: m.at, Net: "unixgram"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		b := make([]byte, 4096)
		for {
			n, err := c.Read(b)
			if err != nil {
				return
			}
			m.mu.Lock()
			m.heard = append(m.heard, strings.ReplaceAll(string(b[:n]), "\n", " "))
			m.mu.Unlock()
		}
	}()
	t.Cleanup(func() { _ = c.Close(); <-done })
	return m
}

func (m *serviceManager) all() []string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return append([]string(nil), m.heard...)
}

// hears waits for a message after the first `from` that has the text, and
// returns it.
func (m *serviceManager) hears(t *testing.T, from int, text string) string {
	t.Helper()
	var found string
	if err := netns.Poll(3*patience, func() error {
		for _, s := range m.all()[from:] {
			if strings.Contains(s, text) {
				found = s
				return nil
			}
		}
		return fmt.Errorf("the service manager heard %q, and nothing of %s", m.all()[from:], text)
	}); err != nil {
		t.Fatal(err)
	}
	return found
}

// unit is the agent as a service: with a binary, a configuration and a service
// manager of its own.
type unit struct {
	*serviceManager
	binary, config string
	log            string // a file: processes that outlive the first write there too
	cmd            *netns.Cmd
}

func (u *unit) logged(t *testing.T) string {
	t.Helper()
	b, err := os.ReadFile(u.log)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// startUnit starts the agent by a file that says what flags do.
func (s *scene) startUnit(t *testing.T, mode string) *unit {
	t.Helper()
	u := &unit{serviceManager: newServiceManager(t, s.Dir), binary: s.Path("kasway-agent"), config: s.Path("agent.yaml"), log: s.Path("agent.log")}
	u.install(t, s)
	u.configure(t, mode)
	// Its arguments are the configuration's alone, but for what the stack needs.
	args := append([]string{"run", "--config", u.config}, s.AgentFlags()...)
	u.cmd = s.Node.Command(u.binary, args...).Cgroup(netns.AgentUnit).BPFFS()
	u.cmd.Env = append(os.Environ(), "NOTIFY_SOCKET="+u.at)
	log, err := os.Create(u.log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		_ = log.Close()
		if text := u.logged(t); t.Failed() || strings.Contains(text, "DATA RACE") || strings.Contains(text, "panic:") {
			t.Errorf("the unit logged:\n%s", text)
		}
	})
	u.cmd.Stdout, u.cmd.Stderr = log, log
	// Under nohup we ignore SIGHUP, and what we start would do so too. What is
	// caught here is not ignored there.
	hangUp := make(chan os.Signal, 1)
	signal.Notify(hangUp, syscall.SIGHUP)
	t.Cleanup(func() { signal.Stop(hangUp) })
	if err := u.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	u.hears(t, 0, "READY=1")
	return u
}

// install puts a new file in the place of the binary, as a package does.
func (u *unit) install(t *testing.T, s *scene) {
	t.Helper()
	b, err := os.ReadFile(s.Binary("agent"))
	if err == nil {
		err = os.WriteFile(u.binary+".new", b, 0o755)
	}
	if err == nil {
		err = os.Rename(u.binary+".new", u.binary)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func (u *unit) configure(t *testing.T, mode string) {
	t.Helper()
	text := fmt.Sprintf(`apiVersion: kasway.dev/v1alpha1
kind: AgentConfig
targets:
- {name: kas, addresses: ["%s", "%s", "%s", "%s"]}
- {name: raw, addresses: ["%s", "%s"]}
intercept: {mode: %s, clients: [host, pods], grace: 2s, graceSpread: 2s}
`, svc4, svc6, kas4, kas6, raw4, raw6, mode)
	if err := os.WriteFile(u.config, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// A service is reloaded: the binary that is there now runs beside the old
// process and takes over, nobody notices, and the service manager has the new
// process for the main one. What cannot start changes nothing.
func TestReload(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{RoutedPods: 1})
	stop, err := stack.Mirror(s.ControlPlane, raw4, raw6)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	u := s.startUnit(t, "nft")
	if err := netns.Poll(patience, func() error { return s.ask(t, s.Node, svc4) }); err != nil {
		t.Fatal(err)
	}
	first := s.statusAt(t, "agent.sock").Generation

	u.configure(t, "nonsense")
	from := len(u.all())
	if err := u.cmd.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	u.hears(t, from, "RELOADING=1")
	u.hears(t, from, "READY=1 STATUS=the last reload failed")
	if text := u.logged(t); !strings.Contains(text, "agent.yaml:6: intercept.mode") || !strings.Contains(text, "the new agent does not take over, this one goes on") {
		t.Errorf("the log does not say why:\n%s", text)
	}
	s.served(t, s.Node, svc4)
	if got := s.statusAt(t, "agent.sock").Generation; got != first {
		t.Errorf("agent %s answers", got)
	}

	u.configure(t, "nft")
	u.install(t, s)
	watches := s.holdWatches(t, 4)
	rain := s.newRain(raw4, raw6)
	rain.reach(t, 200)
	from = len(u.all())
	if err := u.cmd.Signal(syscall.SIGHUP); err != nil {
		t.Fatal(err)
	}
	handed := u.hears(t, from, "MAINPID=")
	st := s.statusOf(t, first)
	if err := u.cmd.Wait(); err != nil {
		t.Errorf("the old process ends with %v", err)
	}
	rain.reach(t, int(rain.made.Load())+200)
	for _, failed := range rain.stop() {
		t.Error(failed)
	}
	if !strings.Contains(handed, " READY=1") {
		t.Errorf("the reload is never over: %q", handed)
	}
	if st.Drain == nil {
		t.Fatalf("the old process is %s", st.Phase)
	}
	spreadEvenly(t, *st.Drain, watches)

	pid, err := strconv.Atoi(strings.TrimPrefix(strings.Fields(handed)[0], "MAINPID="))
	if err != nil {
		t.Fatal(err)
	}
	running, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		t.Fatal(err)
	}
	installed, err := os.Stat(u.binary)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(running, installed) {
		t.Error("the new process runs another binary than the one that is installed")
	}
	for _, m := range u.all() {
		if strings.Contains(m, "STOPPING") {
			t.Error("the service manager takes the service for ending")
		}
	}
	for _, h := range s.clients() {
		s.served(t, h, svc4)
	}
	// It is the service now.
	from = len(u.all())
	if err := syscall.Kill(pid, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	u.hears(t, from, "STOPPING=1")
	if err := netns.Poll(patience, func() error {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d/exe", pid)); err == nil {
			return fmt.Errorf("process %d still runs after %s", pid, time.Second)
		}
		return nil
	}); err != nil {
		t.Error(err)
	}
}

// Nobody reads the agent's log: it goes on, and ends when it is told to.
func TestLogIsNotRead(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = r.Close() }()
	if _, err := unix.FcntlInt(w.Fd(), unix.F_SETPIPE_SZ, os.Getpagesize()); err != nil {
		t.Fatal(err)
	}
	args := append(append([]string{"run"}, s.AgentFlags()...), diverting("nft", "--log-level", "debug")...)
	cmd := s.Node.Command(s.Binary("agent"), args...).Cgroup(netns.AgentUnit).BPFFS()
	cmd.Stdout, cmd.Stderr = w, w
	err = cmd.Start()
	_ = w.Close()
	if err != nil {
		t.Fatal(err)
	}
	s.servedAgain(t, s.Node, svc4)
	// Each is some lines, and the pipe holds ten of them.
	for range 50 {
		if err := s.ask(t, s.Node, svc4); err != nil {
			t.Fatalf("not served any more: %v", err)
		}
	}
	if err := cmd.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err != nil {
			t.Error(err)
		}
	case <-time.After(3 * patience):
		t.Error("it does not end")
	}
}
