package tunnel

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/hex"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	"google.golang.org/protobuf/proto"

	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

const protocolDoc = "../../docs/protocol.md"

// example returns the bytes of a block of docs/protocol.md: what of each line
// is hex, before two spaces in a row or a quote begin the explanation.
func example(t *testing.T, name string) []byte {
	t.Helper()
	var b []byte
	for _, line := range strings.Split(block(t, name), "\n") {
		line = strings.TrimSpace(line)
		if i := strings.IndexAny(line, "\""); i >= 0 {
			line = line[:i]
		}
		line, _, _ = strings.Cut(line, "  ")
		data, err := hex.DecodeString(strings.ReplaceAll(line, " ", ""))
		if err != nil {
			t.Fatalf("%s: %q: %v", name, line, err)
		}
		b = append(b, data...)
	}
	return b
}

func block(t *testing.T, name string) string {
	t.Helper()
	doc, err := os.ReadFile(protocolDoc)
	if err != nil {
		t.Fatal(err)
	}
	m := regexp.MustCompile("(?s)```" + name + "\n(.*?)\n```").FindSubmatch(doc)
	if m == nil {
		t.Fatalf("no example %q in %s", name, protocolDoc)
	}
	return string(m[1])
}

// The worked example in docs/protocol.md is what this package speaks.
func TestProtocol_Examples(t *testing.T) {
	want := full()
	if got, err := decodeOpen(openMD(string(example(t, "open")))); err != nil || got != want {
		t.Errorf("the OPEN says %+v, %v", got, err)
	}
	if s, err := encodeOpen(want); err != nil || s != string(example(t, "open")) {
		t.Errorf("the OPEN would be %x, %v", s, err)
	}
	if s := base64.RawStdEncoding.EncodeToString(example(t, "open")); s != block(t, "open-base64") {
		t.Errorf("the header would be %s", s)
	}
	for name, m := range map[string]proto.Message{
		"control-hello":    &tunnelpb.ToServer{Message: &tunnelpb.ToServer_Hello{Hello: newHello("v0.1.0", "node-1")}},
		"server-hello":     &tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Hello{Hello: newHello("v0.1.0", "server-1")}},
		"server-upstreams": &tunnelpb.ToAgent{Message: &tunnelpb.ToAgent_Upstreams{Upstreams: &tunnelpb.Upstreams{Up: map[string]bool{"kas": true}}}},
	} {
		b, err := proto.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		if want := frame(b); !bytes.Equal(example(t, name), want) {
			t.Errorf("%s would be %x", name, want)
		}
	}
}

// frame is gRPC's framing of one message.
func frame(b []byte) []byte {
	return append([]byte{0, byte(len(b) >> 24), byte(len(b) >> 16), byte(len(b) >> 8), byte(len(b))}, b...)
}

// An agent made of nothing but HTTP/2 and the bytes of docs/protocol.md works
// with the server.
func TestProtocol_SecondImplementation(t *testing.T) {
	b := newBench(t, echo(t), setup{server: func(c *ServerConfig) {
		c.ServerID, c.Version = "server-1", "v0.1.0"
		c.Upstreams = func() map[string]bool { return map[string]bool{"kas": true} }
	}})
	l := newLink(NewLinks(LinksConfig{TLS: b.ca.agentTLS()}), b.addr)
	raw, err := net.Dial("tcp", b.addr)
	if err != nil {
		t.Fatal(err)
	}
	defer raw.Close()
	_ = raw.SetDeadline(time.Now().Add(patience))
	conn, err := l.secure(t.Context(), raw)
	if err != nil {
		t.Fatal(err)
	}
	h2 := &http.Transport{
		ForceAttemptHTTP2: true,
		DialTLSContext:    func(context.Context, string, string) (net.Conn, error) { return conn, nil },
	}
	defer h2.CloseIdleConnections()
	call := func(method string, header http.Header) (*io.PipeWriter, *http.Response) {
		t.Helper()
		body, write := io.Pipe()
		r, err := http.NewRequestWithContext(t.Context(), http.MethodPost, "https://"+b.addr+"/kasway.tunnel.v1.Tunnel/"+method, body)
		if err != nil {
			t.Fatal(err)
		}
		r.Header = header
		r.Header.Set("Content-Type", "application/grpc+kasway")
		r.Header.Set("TE", "trailers")
		first := example(t, map[string]string{"Control": "control-hello", "Forward": "bytes"}[method])
		go func() { _, _ = write.Write(first) }()
		response, err := h2.RoundTrip(r)
		if err != nil {
			t.Fatal(err)
		}
		return write, response
	}
	expect := func(r io.Reader, what string) {
		t.Helper()
		want := example(t, what)
		got := make([]byte, len(want))
		if _, err := io.ReadFull(r, got); err != nil || !bytes.Equal(got, want) {
			t.Fatalf("got %x, %v; want %s, %x", got, err, what, want)
		}
	}

	control, answer := call("Control", http.Header{})
	defer func() { _ = control.Close() }()
	expect(answer.Body, "server-hello")
	expect(answer.Body, "server-upstreams")

	stream, answer := call("Forward", http.Header{"Kasway-Open-Bin": {block(t, "open-base64")}})
	if answer.Header.Get(tunnelpb.KeyAccepted) != tunnelpb.ValueAccepted {
		t.Fatalf("not accepted: %v", answer.Header)
	}
	expect(answer.Body, "bytes")
	if _, err := stream.Write(example(t, "end")); err != nil {
		t.Fatal(err)
	}
	expect(answer.Body, "end")
	if rest, err := io.ReadAll(answer.Body); len(rest) > 0 || err != nil {
		t.Fatalf("after the end: %x, %v", rest, err)
	}
	if s := answer.Trailer.Get("Grpc-Status"); s != "0" {
		t.Fatalf("final status %q, want 0", s)
	}
	_ = stream.Close()
}
