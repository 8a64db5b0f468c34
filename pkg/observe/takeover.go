package observe

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
)

// TakeOver listens on a socket of this generation's own beside path, and makes
// path a symbolic link to it: two processes may be there at once, as during an
// upgrade, and whoever asks at path reaches the newest. other reports that an
// older one still answers. Sockets of dead processes are removed. Closing the
// listener removes what is its own. What is at path and neither such a link
// nor a stale socket is an error and stays as it is.
func TakeOver(path, generation string) (l net.Listener, other bool, err error) {
	other = isLink(path) && Answers(path)
	if !other {
		if err := RemoveStale(path); err != nil {
			return nil, false, err
		}
	}
	own := generationSocket(path, generation)
	if l, err = ListenSocket(own); err != nil {
		return nil, false, err
	}
	if err := point(path, own); err != nil {
		return nil, false, errors.Join(err, l.Close())
	}
	return &takenOver{Listener: l, path: path, target: filepath.Base(own)}, other, nil
}

// point makes path a link to socket, in one step.
func point(path, socket string) error {
	// A link cannot be replaced in place, but renamed over.
	fresh := socket + ".new"
	if err := errors.Join(os.Symlink(filepath.Base(socket), fresh), os.Rename(fresh, path)); err != nil {
		return fmt.Errorf("socket %s: pointing it to %s: %w", path, filepath.Base(socket), err)
	}
	return nil
}

// takenOver takes the link away with the socket, unless it is a newer one's, or
// gives it back to an older one that still answers.
type takenOver struct {
	net.Listener
	path, target string
}

// Close implements net.Listener.
func (t *takenOver) Close() error {
	err := t.Listener.Close()
	if target, lerr := os.Readlink(t.path); lerr != nil || target != t.target {
		return err
	}
	sockets, gerr := filepath.Glob(generationSocket(t.path, "*"))
	for _, s := range sockets {
		if Answers(s) {
			return errors.Join(err, point(t.path, s))
		}
	}
	return errors.Join(err, gerr, os.Remove(t.path))
}

// Sockets are those of every process that answers beside path: of all the
// generations that TakeOver has made there, or else path itself.
func Sockets(path string) []string {
	// The pattern is well formed unless path is odd; then path alone is tried.
	all, _ := filepath.Glob(generationSocket(path, "*"))
	all = slices.DeleteFunc(all, func(s string) bool { return !Answers(s) })
	if len(all) == 0 {
		return []string{path}
	}
	return all
}

// Answers reports whether somebody listens on the socket at path.
func Answers(path string) bool {
	c, err := net.DialTimeout("unix", path, time.Second)
	if err != nil {
		return false
	}
	return c.Close() == nil
}

// RemoveStale removes what dead processes left of TakeOver(path): the sockets
// of all generations, and the link. A socket that answers at path is an error
// and stays, as everything does that is none of those.
func RemoveStale(path string) error {
	sockets, err := filepath.Glob(generationSocket(path, "*"))
	if err != nil {
		return fmt.Errorf("socket %s: looking for stale ones: %w", path, err)
	}
	for _, s := range sockets {
		if Answers(s) {
			continue // of another agent that lives; path says whether it matters
		}
		if err := RemoveStaleSocket(s); err != nil {
			return err
		}
	}
	switch {
	case !isLink(path):
		return RemoveStaleSocket(path)
	case Answers(path):
		return fmt.Errorf("socket %s: another process listens on it: %w", path, syscall.EADDRINUSE)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket %s: removing what a dead process left: %w", path, err)
	}
	return nil
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode().Type() == fs.ModeSymlink
}

// generationSocket is agent-GENERATION.sock for agent.sock.
func generationSocket(path, generation string) string {
	ext := filepath.Ext(path)
	return strings.TrimSuffix(path, ext) + "-" + generation + ext
}
