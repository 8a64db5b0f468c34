package observe

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/http"
	"net/http/pprof"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Pages are what a process says of itself, by the path of the question, such
// as "/status". They are called from any goroutine; what they return becomes
// JSON.
type Pages map[string]func() any

// AdminHandler serves /livez, /readyz, the pages and /debug/pprof. It belongs
// on a socket that only root can open: profiles show what is in memory.
func AdminHandler(ready Ready, pages Pages) http.Handler {
	mux := http.NewServeMux()
	health(mux, ready)
	for path, page := range pages {
		mux.HandleFunc("GET "+path, func(w http.ResponseWriter, _ *http.Request) {
			body, err := json.MarshalIndent(page(), "", "  ")
			if err != nil {
				text(w, http.StatusInternalServerError, err.Error())
				return
			}
			w.Header().Set("Content-Type", "application/json")
			_, _ = w.Write(append(body, '\n'))
		})
	}
	mux.HandleFunc("GET /debug/pprof/", pprof.Index)
	mux.HandleFunc("GET /debug/pprof/cmdline", pprof.Cmdline)
	mux.HandleFunc("GET /debug/pprof/profile", pprof.Profile)
	mux.HandleFunc("GET /debug/pprof/symbol", pprof.Symbol)
	mux.HandleFunc("GET /debug/pprof/trace", pprof.Trace)
	return mux
}

// ListenSocket listens on a UNIX socket that only its owner can open (0600,
// from its first moment on). A missing directory is made (0700), a socket that
// a dead process left behind is replaced; anything else at path, a socket that
// still answers among it, is an error and stays as it is. Closing the listener
// removes the socket.
func ListenSocket(path string) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return nil, fmt.Errorf("socket %s: making its directory: %w", path, err)
	}
	if err := RemoveStaleSocket(path); err != nil {
		return nil, err
	}
	// Linux gives a bound socket the mode that its descriptor has, less the
	// umask: there is no moment in which others could open it.
	config := net.ListenConfig{Control: func(_, _ string, c syscall.RawConn) error {
		var err error
		if e := c.Control(func(fd uintptr) { err = unix.Fchmod(int(fd), 0o600) }); e != nil {
			return e
		}
		return err
	}}
	l, err := config.Listen(context.Background(), "unix", path)
	if err != nil {
		return nil, fmt.Errorf("socket %s: %w", path, err)
	}
	return l, nil
}

// RemoveStaleSocket removes a socket that a dead process left at path; that
// there is none is no error. Anything else at path, a socket that still answers
// among it, is an error and stays as it is.
func RemoveStaleSocket(path string) error {
	info, err := os.Lstat(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("socket %s: %w", path, err)
	}
	if info.Mode().Type() != fs.ModeSocket {
		return fmt.Errorf("socket %s: a file that is no socket is in the way; it was left alone", path)
	}
	c, err := net.DialTimeout("unix", path, time.Second)
	if err == nil {
		_ = c.Close()
		return fmt.Errorf("socket %s: another process listens on it: %w", path, syscall.EADDRINUSE)
	}
	if !errors.Is(err, syscall.ECONNREFUSED) {
		return fmt.Errorf("socket %s: in the way, and whether it is in use could not be found out: %w", path, err)
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("socket %s: removing what a dead process left: %w", path, err)
	}
	return nil
}

// SocketClient returns an HTTP client whose every request goes to the socket
// at path, whatever host its URL names.
func SocketClient(path string) *http.Client {
	var d net.Dialer
	return &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return d.DialContext(ctx, "unix", path)
		},
	}}
}
