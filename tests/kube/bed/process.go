package bed

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// process is one that a bed started. The pid alone does not name it: pids are
// used again, so its start time is kept beside it.
type process struct {
	pid   int
	start string        // field 22 of /proc/PID/stat
	done  chan struct{} // closed when it was reaped; nil: started by another run
}

// place is where a process runs: a network namespace of the bed, a control group
// of cgroup 2 ("": the caller's), and the process whose mounts, processes and host
// name it sees (0: the caller's).
type place struct {
	netns, cgroup string
	like          int
}

// argv wraps a command so that it runs in the place's namespaces. It is nsenter,
// not `ip netns exec`: the latter mounts /sys anew and hides /sys/fs/cgroup from
// the kubelet and containerd.
func (p place) argv(argv []string) []string {
	enter := []string{"nsenter", "--net=/run/netns/" + p.netns}
	if p.like != 0 {
		enter = append(enter, fmt.Sprintf("--target=%d", p.like), "--mount", "--uts", "--pid")
	}
	return append(append(enter, "--"), argv...)
}

// command is a process in p that nobody has started yet; it is killed when ctx
// ends. release gives back what it holds, once it was started.
func (p place) command(ctx context.Context, argv ...string) (cmd *exec.Cmd, release func(), err error) {
	argv = p.argv(argv)
	cmd = exec.CommandContext(ctx, argv[0], argv[1:]...)
	if p.cgroup == "" {
		return cmd, func() {}, nil
	}
	dir := filepath.Join(cgroup2(), p.cgroup)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, nil, err
	}
	f, err := os.Open(dir)
	if err != nil {
		return nil, nil, err
	}
	cmd.SysProcAttr = &syscall.SysProcAttr{UseCgroupFD: true, CgroupFD: int(f.Fd())}
	return cmd, func() { f.Close() }, nil
}

// start runs argv in the background, in a session of its own, its output added
// to log/NAME.log.
func (b *Bed) start(name string, where place, env []string, argv ...string) error {
	log, err := os.OpenFile(b.Path("log", name+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd, release, err := where.command(context.Background(), argv...)
	if err != nil {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	defer release()
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setsid = true
	cmd.Stdout, cmd.Stderr, cmd.Env = log, log, append(os.Environ(), env...)
	if err := cmd.Start(); err != nil {
		return fmt.Errorf("starting %s: %w", name, err)
	}
	p := &process{pid: cmd.Process.Pid, done: make(chan struct{})}
	go func() {
		_ = cmd.Wait() // how it ended is in its log
		close(p.done)
	}()
	// Who enters another pid namespace is a child of what was started, which ends
	// with it.
	for where.like != 0 && p.pid == cmd.Process.Pid {
		select {
		case <-p.done:
			return fmt.Errorf("starting %s: %s", name, b.Tail(name, 5))
		case <-time.After(time.Millisecond):
		}
		if pid, err := child(cmd.Process.Pid); err == nil {
			p.pid = pid
		}
	}
	_, p.start = procStat(p.pid)
	b.ours[name] = p
	return os.WriteFile(b.Path("pid", name), fmt.Appendf(nil, "%d %s\n", p.pid, p.start), 0o644)
}

// child is the one child of a process.
func child(pid int) (only int, err error) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", pid, pid))
	if err == nil {
		_, err = fmt.Sscan(string(text), &only)
	}
	return only, err
}

// Running says why the process of that name does not run, or nil.
func (b *Bed) Running(name string) error {
	p, ok := b.ours[name]
	if !ok {
		return fmt.Errorf("%s was not started", name)
	}
	select {
	case <-p.done:
		return fmt.Errorf("%s has ended: %s", name, b.Tail(name, 5))
	default:
		return nil
	}
}

// Kill sends SIGKILL to a process of the bed and waits for its end.
func (b *Bed) Kill(name string) error {
	return b.end(context.Background(), name, unix.SIGKILL)
}

// Terminate sends SIGTERM to one, and waits for its end or that of ctx.
func (b *Bed) Terminate(ctx context.Context, name string) error {
	return b.end(ctx, name, unix.SIGTERM)
}

func (b *Bed) end(ctx context.Context, name string, sig unix.Signal) error {
	p, ok := b.ours[name]
	if !ok {
		return fmt.Errorf("%s was not started", name)
	}
	if err := p.signal(sig); err != nil {
		return fmt.Errorf("ending %s: %w", name, err)
	}
	select {
	case <-p.done:
	case <-ctx.Done():
		return fmt.Errorf("%s does not end: %w", name, ctx.Err())
	}
	delete(b.ours, name)
	return os.Remove(b.Path("pid", name))
}

// rename gives a process another name, so that its own can be used again.
func (b *Bed) rename(from, to string) error {
	p, ok := b.ours[from]
	if !ok {
		return fmt.Errorf("%s was not started", from)
	}
	b.ours[to] = p
	delete(b.ours, from)
	return os.Rename(b.Path("pid", from), b.Path("pid", to))
}

// Tail is the end of a process's log.
func (b *Bed) Tail(name string, lines int) string {
	text, err := os.ReadFile(b.Path("log", name+".log"))
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// procStat is the state letter and the start time of a process; "" if there is
// none.
func procStat(pid int) (state, start string) {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return "", ""
	}
	// The name before the last ')' may hold anything.
	f := bytes.Fields(text[bytes.LastIndexByte(text, ')')+1:])
	if len(f) < 20 {
		return "", ""
	}
	return string(f[0]), string(f[19])
}

// alive is false for a zombie too: an orphan's may stay for long.
func (p *process) alive() bool {
	state, start := procStat(p.pid)
	return start == p.start && state != "" && state != "Z" && state != "X"
}

// signal sends sig to the very process: the descriptor is taken first and the
// start time compared after, so that no other one can have taken the pid.
func (p *process) signal(sig unix.Signal) error {
	fd, err := unix.PidfdOpen(p.pid, 0)
	if errors.Is(err, unix.ESRCH) {
		return nil
	}
	if err != nil {
		return err
	}
	defer func() { _ = unix.Close(fd) }()
	if !p.alive() {
		return nil
	}
	if err := unix.PidfdSendSignal(fd, sig, nil, 0); err != nil && !errors.Is(err, unix.ESRCH) {
		return err
	}
	return nil
}

// stopAll ends the processes of the bed in dir; a node's first one takes all that
// is in the node along. Nothing has anything to lose.
func stopAll(dir string) error {
	names, err := os.ReadDir(filepath.Join(dir, "pid"))
	if err != nil {
		return nil // no bed
	}
	var errs []error
	left := map[string]*process{}
	for _, n := range names {
		p := &process{}
		text, err := os.ReadFile(filepath.Join(dir, "pid", n.Name()))
		if err == nil {
			_, err = fmt.Sscan(string(text), &p.pid, &p.start)
		}
		if err == nil {
			left[n.Name()], err = p, p.signal(unix.SIGKILL)
		}
		errs = append(errs, err)
	}
	for range 2 {
		if waitEnd(left) {
			return errors.Join(errs...)
		}
		for _, p := range left {
			errs = append(errs, p.signal(unix.SIGKILL))
		}
	}
	for n := range left {
		errs = append(errs, fmt.Errorf("%s does not end", n))
	}
	return errors.Join(errs...)
}

// waitEnd waits a few seconds for all, and removes from all what has ended.
func waitEnd(all map[string]*process) bool {
	for range 300 {
		for n, p := range all {
			if !p.alive() {
				delete(all, n)
			}
		}
		if len(all) == 0 {
			return true
		}
		time.Sleep(10 * time.Millisecond)
	}
	return false
}
