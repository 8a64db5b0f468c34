package observe

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// serve starts Serve on l and returns what ends it and waits for it.
func serve(t *testing.T, l net.Listener, h http.Handler) (stop func() error) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, l, h) }()
	stop = func() error { cancel(); return <-done }
	t.Cleanup(cancel)
	return stop
}

func get(t *testing.T, c *http.Client, url string) (int, string) {
	t.Helper()
	r, err := c.Get(url)
	if err != nil {
		t.Fatal(err)
	}
	defer r.Body.Close()
	body, err := io.ReadAll(r.Body)
	if err != nil {
		t.Fatal(err)
	}
	return r.StatusCode, string(body)
}

func TestOperatorPortTellsTheTruth(t *testing.T) {
	var why atomic.Value
	why.Store("no link to a server")
	ready := func() error {
		if w := why.Load().(string); w != "" {
			return errors.New(w)
		}
		return nil
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	stop := serve(t, l, OperatorHandler(ready, NewRegistry("agent")))
	c := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	url := "http://" + l.Addr().String()

	if code, body := get(t, c, url+"/readyz"); code != 503 || body != "not ready: no link to a server\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	if code, body := get(t, c, url+"/livez"); code != 200 || body != "ok\n" {
		t.Errorf("/livez = %d %q", code, body)
	}
	why.Store("")
	if code, body := get(t, c, url+"/readyz"); code != 200 || body != "ok\n" {
		t.Errorf("/readyz = %d %q", code, body)
	}
	if code, body := get(t, c, url+"/metrics"); code != 200 || !strings.Contains(body, "kasway_agent_build_info{") {
		t.Errorf("/metrics = %d %.200q", code, body)
	}
	// Profiles show memory: they are not for whoever reaches the port.
	for _, path := range []string{"/debug/pprof/", "/debug/pprof/heap", "/status"} {
		if code, _ := get(t, c, url+path); code != 404 {
			t.Errorf("%s on the operator port = %d", path, code)
		}
	}
	if err := stop(); err != nil {
		t.Errorf("Serve ended with %v", err)
	}
}

func TestServeEndsThoughAPeerIsStuck(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	entered, release := make(chan struct{}), make(chan struct{})
	stop := serve(t, l, http.HandlerFunc(func(http.ResponseWriter, *http.Request) {
		close(entered)
		<-release
	}))
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET / HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	<-entered
	start := time.Now()
	if err := stop(); err != nil {
		t.Errorf("Serve ended with %v", err)
	}
	_ = c.SetReadDeadline(time.Now().Add(10 * time.Second))
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) && !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the stuck peer's connection is still open: %v", err)
	}
	close(release)
	if d := time.Since(start); d > shutdownTimeout+2*time.Second {
		t.Errorf("took %v to stop", d)
	}
}

func TestServeReportsALostListener(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	_ = l.Close()
	if err := Serve(t.Context(), l, http.NotFoundHandler()); err == nil || !strings.Contains(err.Error(), l.Addr().String()) {
		t.Errorf("Serve on a closed listener: %v", err)
	}
}

func TestAdminSocket(t *testing.T) {
	// The umask of a careless parent must not open the socket.
	old := syscall.Umask(0)
	defer syscall.Umask(old)
	path := filepath.Join(t.TempDir(), "run", "server.sock")
	l, err := ListenSocket(path)
	if err != nil {
		t.Fatal(err)
	}
	for p, want := range map[string]os.FileMode{path: 0o600, filepath.Dir(path): 0o700} {
		info, err := os.Stat(p)
		if err != nil {
			t.Fatal(err)
		}
		if info.Mode().Perm() != want {
			t.Errorf("%s has mode %o, want %o", p, info.Mode().Perm(), want)
		}
	}
	status := func() any { return map[string]int{"links": 3} }
	stop := serve(t, l, AdminHandler(func() error { return nil }, Pages{"/status": status}))
	c := SocketClient(path)
	if code, body := get(t, c, "http://admin/status"); code != 200 || body != "{\n  \"links\": 3\n}\n" {
		t.Errorf("/status = %d %q", code, body)
	}
	if code, _ := get(t, c, "http://admin/readyz"); code != 200 {
		t.Errorf("/readyz = %d", code)
	}
	if code, body := get(t, c, "http://admin/debug/pprof/goroutine?debug=1"); code != 200 || !strings.Contains(body, "goroutine profile") {
		t.Errorf("pprof = %d %.100q", code, body)
	}
	if _, err := ListenSocket(path); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a socket in use was taken over: %v", err)
	}
	if err := stop(); err != nil {
		t.Error(err)
	}
	if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the socket outlives its listener: %v", err)
	}
}

func TestSocketOfADeadProcessIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	dead, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	dead.(*net.UnixListener).SetUnlinkOnClose(false)
	_ = dead.Close()
	l, err := ListenSocket(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := RemoveStaleSocket(path); err == nil {
		t.Error("a socket that answers is removed")
	}
	_ = l.Close()
	if err := RemoveStaleSocket(path); err != nil {
		t.Errorf("none is there: %v", err)
	}
}

func TestWhatIsNoSocketIsLeftAlone(t *testing.T) {
	path := filepath.Join(t.TempDir(), "precious")
	if err := os.WriteFile(path, []byte("data"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := ListenSocket(path); err == nil || !strings.Contains(err.Error(), "no socket is in the way") {
		t.Errorf("ListenSocket over a file: %v", err)
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "data" {
		t.Errorf("the file is now %q (%v)", b, err)
	}
}
