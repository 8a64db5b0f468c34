package intercept

import (
	"bufio"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// presencePrefix begins the names of the abstract UNIX sockets by which agents
// are known. Such a name belongs to the network namespace, as all that agents
// install does, and is gone with the process that has it.
//
// # What agents say to each other
//
// An agent listens on "@kasway-agent-GENERATION" from its start to its end.
// Another one connects, says one line, and gets at most one line back; the
// connection then stays open for as long as what was asked for shall last, and
// its end is all that either side need know of the other's. A line is ASCII,
// has at most MaxLine bytes with its end "\n", and words with one space between:
//
//	kasway/1 stand-down GENERATION MODE STAMP   I divert by MODE, and am proven: divert no more
//	kasway/1 listeners GENERATION               give me a copy of your listening sockets
//	kasway/1 yes GENERATION                     done; to "listeners" with the sockets (SCM_RIGHTS)
//	kasway/1 no GENERATION WORD                 not done, and WORD is why
//
// STAMP is when the asker began to install itself, in nanoseconds of
// CLOCK_BOOTTIME. Whoever has the later one, or with equal ones the greater
// generation, is the newer agent, and only that is obeyed: of two that start at
// the same moment one goes on. An agent that has not begun to install itself
// says "no": it will be the newer one, and ask for itself.
//
// Both sides look at the other's SO_PEERCRED before anything else, and hang up
// unless its user is root or their own: an abstract name can be taken, and be
// connected to, by every process of the network namespace. A pod in the host's
// network that runs as root is thus trusted, here as with much else.
//
// Agents of version 0.1 listen and never accept. Whoever asks them waits for as
// long as it thinks fit, and goes on beside them.
const presencePrefix = "@kasway-agent-"

// Bounds of a presence: of the visitors at one time, of the time that one has
// to say its line or to hear the answer, of the pause before something is tried
// again, and of the names that are looked at.
const (
	maxVisitors    = 16
	sayWithin      = 2 * time.Second
	presencePause  = 5 * time.Millisecond
	maxGenerations = 1 << 16
)

// Presence is how an agent is known to others, and what they ask of it.
type Presence struct {
	generation string
	l          *net.UnixListener
	requests   chan *Request
	quit       chan struct{}
	wg         sync.WaitGroup

	mu       sync.Mutex
	visitors map[*net.UnixConn]bool
	closed   bool
}

// Announce makes this agent known to Present until it is closed, in the calling
// thread's network namespace, and begins to listen to others.
func Announce(generation string) (*Presence, error) {
	if !isGeneration(generation) {
		return nil, fmt.Errorf("announcing this agent: %q is no generation", generation)
	}
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: presencePrefix + generation, Net: "unix"})
	if err != nil {
		return nil, fmt.Errorf("announcing this agent: %w", err)
	}
	p := &Presence{
		generation: generation, l: l, requests: make(chan *Request), quit: make(chan struct{}),
		visitors: map[*net.UnixConn]bool{},
	}
	p.wg.Go(p.accept)
	return p, nil
}

// Requests is what other agents ask for, each to be answered once. An agent
// that does not receive lets the others wait.
func (p *Presence) Requests() <-chan *Request { return p.requests }

// Close makes the agent unknown and hangs up on everybody.
func (p *Presence) Close() error {
	p.mu.Lock()
	if p.closed {
		p.mu.Unlock()
		return nil
	}
	p.closed = true
	close(p.quit)
	err := p.l.Close()
	for c := range p.visitors {
		_ = c.Close() // nothing is lost: who waits for an answer sees the end
	}
	p.mu.Unlock()
	p.wg.Wait()
	return err
}

func (p *Presence) accept() {
	for {
		c, err := p.l.AcceptUnix()
		switch {
		case errors.Is(err, net.ErrClosed):
			return
		case err != nil:
			// For want of descriptors, which passes.
			select {
			case <-time.After(presencePause):
			case <-p.quit:
				return
			}
		case trusted(c) != nil || !p.admit(c):
			_ = c.Close() // a stranger, or one too many: not a word to it
		default:
			p.wg.Go(func() { p.visit(c) })
		}
	}
}

func (p *Presence) admit(c *net.UnixConn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed || len(p.visitors) >= maxVisitors {
		return false
	}
	p.visitors[c] = true
	return true
}

// visit hears what a visitor asks, hands it on, and stays until one side ends
// the connection.
func (p *Presence) visit(c *net.UnixConn) {
	defer func() {
		p.mu.Lock()
		delete(p.visitors, c)
		p.mu.Unlock()
		_ = c.Close()
	}()
	l, err := hear(c, sayWithin)
	if err != nil || l.Verb != VerbStandDown && l.Verb != VerbListeners {
		return
	}
	r := &Request{Line: l, PID: peerPID(c), own: p.generation, conn: c, gone: make(chan struct{})}
	p.wg.Go(func() {
		select {
		case p.requests <- r:
		case <-r.gone:
		case <-p.quit:
		}
	})
	// It has nothing more to say: whatever comes, it is over.
	_, _ = c.Read(make([]byte, 1))
	close(r.gone)
}

// Request is what another agent asks for.
type Request struct {
	Line
	// PID is the asker's as this process sees it; 0: it cannot.
	PID  int
	own  string
	conn *net.UnixConn
	gone chan struct{}
}

// Gone is closed when the asker has ended, or does not want it any longer.
func (r *Request) Gone() <-chan struct{} { return r.gone }

// Yes answers that it is done.
func (r *Request) Yes() error { return r.answer(Line{Verb: VerbYes, Generation: r.own}, nil) }

// No answers that it is not, and why in a word.
func (r *Request) No(why string) error {
	return r.answer(Line{Verb: VerbNo, Generation: r.own, Word: why}, nil)
}

// Give answers with copies of listening sockets.
func (r *Request) Give(sockets []*net.TCPListener) error {
	var (
		fds []int
		err error
	)
	for _, s := range sockets {
		d, derr := duplicate(s)
		if derr == nil {
			fds = append(fds, d)
		}
		err = errors.Join(err, derr)
	}
	defer func() {
		for _, fd := range fds {
			_ = unix.Close(fd) // a copy of ours, whoever has got it
		}
	}()
	if err != nil {
		return errors.Join(err, r.No("failed"))
	}
	return r.answer(Line{Verb: VerbYes, Generation: r.own}, unix.UnixRights(fds...))
}

// duplicate makes a second descriptor of a socket. Its File would do, but for
// that os.File can make what both share block.
func duplicate(l *net.TCPListener) (d int, err error) {
	raw, err := l.SyscallConn()
	if err != nil {
		return -1, fmt.Errorf("handing over a listener: %w", err)
	}
	cerr := raw.Control(func(fd uintptr) { d, err = unix.FcntlInt(fd, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(cerr, err); err != nil {
		return -1, fmt.Errorf("handing over a listener: %w", err)
	}
	return d, nil
}

func (r *Request) answer(l Line, rights []byte) error {
	if err := r.conn.SetWriteDeadline(time.Now().Add(sayWithin)); err != nil {
		return fmt.Errorf("answering agent %s: %w", r.Generation, err)
	}
	if _, _, err := r.conn.WriteMsgUnix([]byte(l.String()), rights, nil); err != nil {
		return fmt.Errorf("answering agent %s: %w", r.Generation, err)
	}
	return nil
}

// Present lists the generations of the agents that live in the calling thread's
// network namespace, whatever their configuration. Anybody can take such a
// name: see Others.
func Present() ([]string, error) {
	f, err := os.Open("/proc/thread-self/net/unix")
	if err != nil {
		return nil, fmt.Errorf("looking for agents: %w", err)
	}
	defer f.Close()
	var generations []string
	seen := map[string]bool{}
	lines := bufio.NewScanner(f)
	for lines.Scan() && len(generations) < maxGenerations {
		_, name, found := strings.Cut(lines.Text(), " "+presencePrefix)
		// Accepted sockets have the name of the one that listens.
		if found && isGeneration(name) && !seen[name] {
			seen[name] = true
			generations = append(generations, name)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("looking for agents: %w", err)
	}
	return generations, nil
}
