package kas

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var clusterIP = netip.MustParseAddr("10.96.0.1")

// running starts a server on loopback; every dial of its clients leads there.
func running(t *testing.T) (*Server, DialFunc) {
	t.Helper()
	s, err := New(Config{Names: []string{"kas.example"}, Interval: 20 * time.Millisecond,
		Addresses: []netip.Addr{clusterIP, netip.MustParseAddr("fd00:96::1"), netip.MustParseAddr("127.0.0.1")}})
	if err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 1)
	go func() { done <- s.Serve(l) }()
	t.Cleanup(func() {
		if err := errors.Join(s.Close(), <-done); err != nil {
			t.Error(err)
		}
	})
	return s, func(ctx context.Context, network, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, network, l.Addr().String())
	}
}

func client(t *testing.T, base string, s *Server, dial DialFunc, http2 bool) *Client {
	t.Helper()
	c, err := NewClient(base, s.CA(), dial, http2)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

func TestServesBothProtocolsUnderEveryName(t *testing.T) {
	s, dial := running(t)
	for _, base := range []string{"https://10.96.0.1", "https://[fd00:96::1]:443", "https://kas.example:6443", "https://127.0.0.1"} {
		for _, http2 := range []bool{false, true} {
			c := client(t, base, s, dial, http2)
			if v, err := c.Version(t.Context()); err != nil || !strings.HasPrefix(v, "v1.") {
				t.Errorf("%s: version %q, %v", base, v, err)
			}
			if b, err := c.Get(t.Context(), "/readyz"); err != nil || b != "ok" {
				t.Errorf("%s: readyz %q, %v", base, b, err)
			}
			if who, err := c.WhoAmI(t.Context()); err != nil || !strings.HasPrefix(who, "127.0.0.1:") {
				t.Errorf("%s: whoami %q, %v", base, who, err)
			}
			if err := errors.Join(c.Download(t.Context(), 1<<20), c.Upload(t.Context(), 1<<20)); err != nil {
				t.Errorf("%s: %v", base, err)
			}
		}
	}
	if _, err := client(t, "https://10.96.0.2", s, dial, true).Version(t.Context()); err == nil {
		t.Error("the certificate verifies for an address that it does not have")
	}
}

func TestWatch(t *testing.T) {
	s, dial := running(t)
	for proto, http2 := range map[string]bool{"HTTP/1.1": false, "HTTP/2.0": true} {
		c := client(t, "https://10.96.0.1", s, dial, http2)
		w, err := c.Watch(t.Context(), "count=3")
		if err != nil {
			t.Fatal(err)
		}
		for want := range 3 {
			e, err := w.Next()
			if err != nil || e.Object.Metadata.ResourceVersion != string(rune('1'+want)) {
				t.Errorf("event %d: %+v, %v", want+1, e, err)
			}
		}
		if _, err := w.Next(); !errors.Is(err, io.EOF) {
			t.Errorf("after the last event: %v", err)
		}
		if w.Proto != proto {
			t.Errorf("speaks %s, want %s", w.Proto, proto)
		}
		_ = w.Close()
	}
}

func TestExecKeepsHalfClose(t *testing.T) {
	s, dial := running(t)
	c := client(t, "https://10.96.0.1", s, dial, false)
	e, err := c.Exec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	if err := e.Echo(bytes.Repeat([]byte("kasway "), 1<<16)); err != nil {
		t.Error(err)
	}
}

func TestUpgradeIsRefusedWithout(t *testing.T) {
	s, dial := running(t)
	for _, http2 := range []bool{false, true} {
		c := client(t, "https://10.96.0.1", s, dial, http2)
		if _, err := c.Get(t.Context(), "/api/v1/namespaces/x/pods/y/exec"); err == nil || !strings.Contains(err.Error(), "400") {
			t.Errorf("exec without Upgrade: %v", err)
		}
	}
}

// Close ends an upgraded connection and a watch.
func TestCloseEndsEverything(t *testing.T) {
	s, dial := running(t)
	c := client(t, "https://10.96.0.1", s, dial, true)
	e, err := c.Exec(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = e.Close() }()
	w, err := c.Watch(t.Context(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = w.Close() }()
	if err := s.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := e.Read(make([]byte, 1)); err == nil {
		t.Error("the upgraded connection lives on")
	}
	for err == nil {
		_, err = w.Next()
	}
	if errors.Is(err, io.EOF) {
		t.Error("a watch that was cut looks like one that ended")
	}
}

// A download that the server cannot finish never looks whole.
func TestDownloadNoticesDamage(t *testing.T) {
	s, dial := running(t)
	s.http.Handler = http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Trailer", shaTrailer)
		_, _ = w.Write([]byte("short"))
		w.Header().Set(shaTrailer, "0000")
	})
	if err := client(t, "https://10.96.0.1", s, dial, false).Download(t.Context(), 5); err == nil {
		t.Error("a wrong hash passed")
	}
}

func TestCurl(t *testing.T) {
	s, dial := running(t)
	c, err := dial(t.Context(), "tcp", "")
	if err != nil {
		t.Fatal(err)
	}
	addr := c.RemoteAddr().String()
	c.Close()
	ca := filepath.Join(t.TempDir(), "ca.pem")
	if err := os.WriteFile(ca, s.CA(), 0o600); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("curl", "-sS", "--cacert", ca, "--connect-to", "kas.example:443:"+addr, "https://kas.example/version").CombinedOutput()
	if errors.Is(err, exec.ErrNotFound) {
		t.Skip("curl is not installed")
	}
	if err != nil || !strings.Contains(string(out), "gitVersion") {
		t.Errorf("%s, %v", out, err)
	}
}
