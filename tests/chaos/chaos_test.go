//go:build chaos

package chaos

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// within is how soon after the blow the state of whenDown must hold, and the
// longest that a connect may ever block.
const within = 3 * time.Second

// kasPort is where the stand-in serves.
const kasPort = 6443

// bind is the address of mode listen.
var bind = netip.MustParseAddr("169.254.77.2")

func binaries(t *testing.T) string {
	t.Helper()
	bin, err := filepath.Abs("../../bin")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(filepath.Join(bin, "kasway-agent")); err != nil {
		t.Fatalf("%v: `make chaos` builds it", err)
	}
	return bin
}

func TestChaos(t *testing.T) {
	for _, mode := range []string{"nft", "iptables", "listen"} {
		for _, whenDown := range []string{"refuse", "direct"} {
			if mode == "listen" && whenDown == "direct" {
				continue // its address is the agent's own: nobody else answers there
			}
			for _, sig := range []syscall.Signal{syscall.SIGKILL, syscall.SIGSTOP} {
				t.Run(fmt.Sprintf("%s/%s/%s", mode, whenDown, name(sig)), func(t *testing.T) {
					strike(t, mode, whenDown, sig)
				})
			}
		}
	}
}

func name(s syscall.Signal) string {
	return map[syscall.Signal]string{syscall.SIGKILL: "SIGKILL", syscall.SIGSTOP: "SIGSTOP"}[s]
}

// scene is a stack with its KAS, and what clients dial.
type scene struct {
	*stack.Stack
	clients []*netns.Host
	to      []netip.AddrPort
	flags   []string
}

func setUp(t *testing.T, mode, whenDown string) *scene {
	topo := netns.New(t, netns.Spec{RoutedPods: 1, BridgePods: 1, BridgeNF: true})
	kas4, kas6 := netip.AddrPortFrom(netns.KAS4, kasPort), netip.AddrPortFrom(netns.KAS6, kasPort)
	stop, err := stack.Mirror(topo.ControlPlane, kas4, kas6)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(stop)
	dir, err := stack.TempDir()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	st, err := stack.New(topo, binaries(t), dir)
	if err != nil {
		t.Fatal(err)
	}
	s := &scene{Stack: st, clients: []*netns.Host{topo.Node}}
	s.flags = []string{"--mode", mode, "--when-down", whenDown}
	if mode == "listen" {
		s.to = []netip.AddrPort{netip.AddrPortFrom(bind, kasPort)}
		s.flags = append(s.flags, "--bind-address", bind.String(), "--target", fmt.Sprintf("%d:%s", kasPort, kas4))
	} else {
		s.clients = append(s.clients, topo.RoutedPods[0], topo.BridgedPods[0])
		s.to = []netip.AddrPort{kas4, kas6}
		s.flags = append(s.flags, "--clients", "host,pods", "--target", fmt.Sprintf("kas=%s,%s", kas4, kas6))
	}
	if _, err := s.Server(kas4.String()); err != nil {
		t.Fatal(err)
	}
	return s
}

func strike(t *testing.T, mode, whenDown string, sig syscall.Signal) {
	s := setUp(t, mode, whenDown)
	around := netns.Around{Trees: []string{s.Dir + "/state"}}
	before, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	agent, err := s.Agent(s.flags...)
	if err != nil {
		t.Fatal(err)
	}
	storm := newStorm(s.clients, s.to)
	agent, struck, revived, restored, err := s.blow(storm, agent, sig)
	all := storm.end()
	t.Logf("%s", summary(all))
	if err != nil {
		t.Fatal(err)
	}
	judge(t, all, storm.workers, whenDown, struck, revived, restored)
	s.tidy(t, agent, whenDown, before, around)
}

// blow strikes, waits until every client has met what is left, and revives. It
// returns the agent that lives in the end, and when what happened.
func (s *scene) blow(storm *storm, was *stack.Process, sig syscall.Signal) (agent *stack.Process, struck, revived, restored time.Time, err error) {
	agent = was
	if err = storm.proceed(time.Time{}, 50); err != nil {
		return
	}
	struck = time.Now()
	if err = agent.Signal(sig); err != nil {
		return
	}
	if err = storm.proceed(struck.Add(within), 50); err != nil {
		return
	}
	revived = time.Now()
	if sig == syscall.SIGSTOP {
		if err = agent.Signal(syscall.SIGCONT); err != nil {
			return
		}
		restored = revived.Add(within)
	} else {
		_ = agent.Wait()
		if agent, err = s.Agent(s.flags...); err != nil {
			return
		}
		restored = time.Now()
	}
	err = storm.proceed(restored, 50)
	return
}

func judge(t *testing.T, all []connect, workers int, whenDown string, struck, revived, restored time.Time) {
	t.Helper()
	down := refused
	if whenDown == "direct" {
		down = direct
	}
	inFlight, shown := 0, 0
	fail := func(rule string, c connect) {
		if shown++; shown <= 10 {
			t.Errorf("%s: %s", rule, c)
		}
	}
	for _, c := range all {
		switch {
		case c.blocked > within:
			fail("blocked in connect for longer than 3 s", c)
		case c.what == odd:
			fail("an errno other than ECONNREFUSED", c)
		case whenDown == "refuse" && c.what == direct:
			fail("escaped to the KAS", c)
		case c.ended.Before(struck) && c.what != carried:
			fail("before the blow", c)
		case c.begun.After(struck.Add(within)) && c.ended.Before(revived) && c.what != down:
			fail("3 s after the blow it should be "+down, c)
		case c.begun.After(restored) && c.what != carried:
			fail("after the recovery", c)
		}
		if c.what == broken {
			inFlight++
		}
	}
	if inFlight > workers {
		t.Errorf("%d connections were cut, more than the %d workers have in flight", inFlight, workers)
		for _, c := range all {
			if c.what == broken {
				t.Logf("%s after the blow, %s after the revival: %s", c.begun.Sub(struck).Round(time.Millisecond), c.begun.Sub(revived).Round(time.Millisecond), c)
			}
		}
	}
}

func summary(all []connect) string {
	count := map[string]int{}
	var longest time.Duration
	for _, c := range all {
		count[c.what]++
		longest = max(longest, c.blocked)
	}
	var parts []string
	for _, w := range []string{carried, refused, direct, broken, odd} {
		parts = append(parts, fmt.Sprintf("%d %s", count[w], w))
	}
	return fmt.Sprintf("%d connects: %s; longest connect %s", len(all), strings.Join(parts, ", "), longest.Round(time.Millisecond))
}

// tidy stops the agent, sees that its guard outlives it, and proves that two
// cleanups leave the node as it was.
func (s *scene) tidy(t *testing.T, agent *stack.Process, whenDown string, before netns.Snapshot, around netns.Around) {
	t.Helper()
	if err := agent.Signal(syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if err := agent.Wait(); err != nil {
		t.Errorf("the agent ends with %v after SIGTERM\n%s", err, agent.Log())
	}
	for _, h := range s.clients {
		for _, to := range s.to {
			var c connect
			_ = h.Do(func() error {
				c = one(h.Label+" -> "+to.String(), to, []netip.Addr{h.Addr4, h.Addr6})
				return nil
			})
			if want := map[string]string{"refuse": refused, "direct": direct}[whenDown]; c.what != want {
				t.Errorf("after SIGTERM it should be %s: %s", want, c)
			}
		}
	}
	for range 2 {
		if err := s.Cleanup(); err != nil {
			t.Fatal(err)
		}
	}
	after, err := s.Node.Snapshot(around)
	if err != nil {
		t.Fatal(err)
	}
	for _, line := range before.Diff(after) {
		t.Errorf("left behind: %s", line)
	}
}
