package stories

import (
	"crypto/tls"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// bad is one way to misbehave at a listener of p.
type bad struct {
	name string
	do   func(t *testing.T)
	// counter rises, and a line with both texts is logged.
	counter string
	log     []string
}

// withstands lets everybody misbehave and proves that each is counted and
// logged, that nothing is leaked, and that ordinary clients are served.
func (s *scene) withstands(t *testing.T, p *stack.Process, all []bad) {
	t.Helper()
	s.served(t, s.Node, svc4)
	same := s.steady(t)
	for _, b := range all {
		t.Run(b.name, func(t *testing.T) {
			from := len(p.Log())
			var was float64
			if b.counter != "" {
				was = metric(t, p, b.counter)
			}
			b.do(t)
			if b.counter != "" {
				rises(t, p, b.counter, was, 1)
			}
			if b.log != nil {
				// Lines that anybody can cause are limited to one a second.
				err := netns.Poll(patience, func() error {
					if !hasLine(p.Log()[from:], b.log) {
						b.do(t)
						return errors.New("not logged")
					}
					return nil
				})
				if err != nil {
					t.Errorf("no line has all of %q:\n%s", b.log, p.Log()[from:])
				}
			}
			s.served(t, s.Node, svc4)
		})
	}
	same()
}

func hasLine(log string, texts []string) bool {
	for line := range strings.Lines(log) {
		found := true
		for _, text := range texts {
			found = found && strings.Contains(line, text)
		}
		if found {
			return true
		}
	}
	return false
}

// handshakes are the ways to fail before there is a link.
func (s *scene) handshakes(t *testing.T) []bad {
	other, err := certs.NewAuthority("another CA", time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	good := s.member(t, s.Authority, time.Hour)
	refused := func(reason string) string { return `kasway_server_handshake_failures_total{reason="` + reason + `"}` }
	line := func(reason string) []string {
		return []string{"did not become a link", `"reason":"` + reason + `"`, "192.168.77.10"}
	}
	tlsWith := func(pair *certs.Pair, change func(*tls.Config)) func(t *testing.T) {
		return func(t *testing.T) {
			c := s.raw(t)
			defer c.Close()
			cfg := s.clientTLS(t, pair)
			change(cfg)
			if err := handshake(c, cfg); err == nil {
				t.Error("the server accepts it")
			}
		}
	}
	as := func(*tls.Config) {}
	bytesOf := func(text string, wait bool) func(t *testing.T) {
		return func(t *testing.T) {
			c := s.raw(t)
			defer c.Close()
			if _, err := io.WriteString(c, text); err != nil {
				t.Error(err)
			}
			if wait {
				_, _ = io.Copy(io.Discard, c) // until the server ends it
			}
		}
	}
	half := clientHello(t)
	return []bad{
		{"garbage", bytesOf("GET / HTTP/1.1\r\nHost: x\r\n\r\n", true), refused("not_tls"), line("not_tls")},
		{"half a handshake, then nothing", bytesOf(half, true), refused("timeout"), line("timeout")},
		{"half a handshake, then gone", bytesOf(half, false), refused("closed"), line("closed")},
		{"nothing at all", bytesOf("", false), refused("closed"), nil}, // as health checks do
		{"another CA", tlsWith(s.member(t, other, time.Hour), as), refused("unknown_ca"), line("unknown_ca")},
		{"expired", tlsWith(s.member(t, s.Authority, time.Nanosecond), as), refused("expired"), line("expired")},
		{"no certificate", tlsWith(nil, as), refused("no_certificate"), line("no_certificate")},
		{"old TLS", tlsWith(good, func(c *tls.Config) { c.MaxVersion = tls.VersionTLS12 }), refused("tls_version"), line("tls_version")},
		{"another protocol", tlsWith(good, func(c *tls.Config) { c.NextProtos = []string{"http/1.1"} }), refused("alpn"), line("alpn")},
		{"the server under another name", tlsWith(good, func(c *tls.Config) { c.ServerName = "not.the.server" }), refused("refused_by_agent"), line("refused_by_agent")},
	}
}

// clientHello is the first half of one.
func clientHello(t *testing.T) string {
	t.Helper()
	a, b := net.Pipe()
	defer b.Close()
	go func() {
		defer a.Close()
		_ = tls.Client(a, &tls.Config{ServerName: "x", MinVersion: tls.VersionTLS13}).Handshake()
	}()
	buf := make([]byte, 100)
	if _, err := io.ReadFull(b, buf); err != nil {
		t.Fatal(err)
	}
	return string(buf)
}

// Whoever reaches the agents' port without the credentials of an agent gets
// nothing there, and is on record.
func TestBadInputHandshakes(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	s.withstands(t, s.server, s.handshakes(t))
}

// An agent that breaks the protocol harms itself alone.
func TestBadInputFromAnAgent(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	good := s.member(t, s.Authority, time.Hour)
	const noHello = `kasway_server_handshake_failures_total{reason="no_hello"}`
	opens := func(kind string) string { return `kasway_server_bad_opens_total{kind="` + kind + `"}` }
	call := func(want, method string, message []byte, metadata ...string) func(t *testing.T) {
		return func(t *testing.T) {
			p := s.newPeer(t, good)
			defer p.close()
			p.call(method, message, metadata...)
			if got := p.answer(); !strings.Contains(got, want) {
				t.Errorf("the answer is %q, want %q", got, want)
			}
		}
	}
	open := func(want string, value ...string) func(t *testing.T) {
		var metadata []string
		for _, v := range value {
			metadata = append(metadata, tunnelpb.KeyOpen, v)
		}
		return call(want, tunnelpb.MethodForward, nil, metadata...)
	}
	const invalid = "grpc-status=3" // INVALID_ARGUMENT
	stream := func(kind string) []string {
		return []string{"a stream was refused", `"reason":"` + kind + `"`, "192.168.77.10"}
	}
	link := []string{"did not become a link", "no_hello"}
	s.withstands(t, s.server, []bad{
		{"no OPEN", open(invalid), opens("missing"), stream("missing")},
		{"empty OPEN", open(invalid, ""), opens("invalid"), stream("invalid")},
		{"two OPENs", open(invalid, openOf("1", "kas"), openOf("2", "kas")), opens("repeated"), stream("repeated")},
		{"OPEN of 5 KiB", open(invalid, openOf("1", strings.Repeat("k", 5<<10))), opens("too_large"), stream("too_large")},
		{"OPEN of a target of 300 bytes", open(invalid, openOf("1", strings.Repeat("k", 300))), opens("invalid"), stream("invalid")},
		{"OPEN that is no protobuf", open(invalid, binary([]byte("\xff\xff\xff"))), opens("malformed"), stream("malformed")},
		{"OPEN whose text is not UTF-8", open(invalid, openOf("\xff\xfe", "kas")), opens("malformed"), stream("malformed")},
		{"non-ASCII OPEN before any hello", open(invalid, openOf("é", "kàs")), opens("no_hello"), stream("no_hello")},
		{"metadata that is not base64", open("grpc-status=13", "!!!"), noHello, link},
		{"headers of 64 KiB", call("", tunnelpb.MethodForward, nil, "x", strings.Repeat("x", 64<<10)), noHello, link},
		{"unknown method", call("grpc-status=12", "/kasway.tunnel.v1.Tunnel/Nonsense", nil), noHello, link},
		{"unknown service", call("grpc-status=12", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo", nil), noHello, link},
		{"message over the limit", call("grpc-status=8", tunnelpb.MethodControl, announced(2<<20)), noHello, link},
		{"hello that is none", call("grpc-status=3", tunnelpb.MethodControl, append(announced(2), 0x3a, 0)), `kasway_server_handshake_failures_total{reason="protocol"}`, []string{"did not become a link", "protocol"}},
		{"hello that is no protobuf", call("grpc-status=13", tunnelpb.MethodControl, append(announced(3), 0xff, 0xff, 0xff)), noHello, link},
		{"hello of another version", call("grpc-status=9", tunnelpb.MethodControl, hello(7, 9)), `kasway_server_handshake_failures_total{reason="protocol"}`, []string{"no common protocol", "speaks 7 to 9"}},
		{"garbage behind TLS", func(t *testing.T) {
			c := tls.Client(s.raw(t), s.clientTLS(t, good))
			defer shut(c)
			if _, err := io.WriteString(c, strings.Repeat("garbage ", 100)); err != nil {
				t.Error(err)
			}
			_, _ = io.Copy(io.Discard, c)
		}, noHello, link},
		{"silence behind TLS", func(t *testing.T) {
			c := tls.Client(s.raw(t), s.clientTLS(t, good))
			defer shut(c)
			start := time.Now()
			if err := c.Handshake(); err != nil {
				t.Error(err)
			}
			_, _ = io.Copy(io.Discard, c)
			if took := time.Since(start); took > 8*time.Second {
				t.Errorf("the server waits for %s", took)
			}
		}, noHello, nil},
	})
}

// hello is a message with a hello that speaks protocols from least to most.
func hello(least, most byte) []byte {
	inner := append(field(1, "v9"), 2<<3, most, 3<<3, least)
	outer := field(1, string(inner))
	return append(announced(uint32(len(outer))), outer...)
}

// Whoever is near may connect to the operators' ports and the agent's listeners.
func TestBadInputAtTheOtherPorts(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	for _, p := range []struct {
		process *stack.Process
		host    *netns.Host
		at      string
	}{{s.server, s.ControlPlane, stack.ServerOperators}, {s.agent, s.Node, stack.AgentOperators}} {
		say := func(text, want string) func(t *testing.T) {
			return func(t *testing.T) {
				c := connect(t, p.host, netip.MustParseAddrPort(p.at))
				defer shut(c)
				deadline(t, c, 12*time.Second)
				_, _ = io.WriteString(c, text)
				got, err := io.ReadAll(c)
				var late net.Error
				if errors.As(err, &late) && late.Timeout() {
					t.Errorf("it is not ended within 12 s")
				}
				if !strings.HasPrefix(string(got), want) {
					t.Errorf("the answer is %.40q, want %q", got, want)
				}
			}
		}
		t.Run(p.process.Name, func(t *testing.T) {
			s.withstands(t, p.process, []bad{
				{name: "garbage", do: say("\x16\x03\x01\x00\x01garbage\r\n\r\n", "HTTP/1.1 400")},
				{name: "headers without end", do: say("GET /livez HTTP/1.1\r\nx: "+strings.Repeat("x", 64<<10), "HTTP/1.1 431")},
				{name: "slow", do: say("GET /livez HTTP/1.1\r\nHost: x\r\n", "")},
				{name: "pprof", do: say("GET /debug/pprof/ HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n", "HTTP/1.1 404")},
			})
		})
	}
	t.Run("many clients that say nothing", func(t *testing.T) {
		s.withstands(t, s.agent, []bad{{name: "64 of them", do: func(t *testing.T) {
			for range 64 {
				c := connect(t, s.Node, svc4)
				defer reset(t, c)
			}
		}}})
	})
}

// An agent told to use what is no server says so, counts it, and goes on with
// those that are.
func TestBadServers(t *testing.T) {
	t.Parallel()
	s := newScene(t, netns.Spec{})
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	garbage := netip.AddrPortFrom(s.ControlPlane.Addr4, 9001)
	far := accepts(t, s.ControlPlane, garbage)
	stop := make(chan struct{})
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		for {
			select {
			case c := <-far:
				_, _ = io.WriteString(c, "SSH-2.0-none\r\n")
				shut(c)
			case <-stop:
				return
			}
		}
	}()
	defer func() { close(stop); <-answered }()
	other := netip.AddrPortFrom(s.ControlPlane.Addr4, servicePort)
	if err := s.serveKAS(other); err != nil { // TLS of another CA
		t.Fatal(err)
	}
	nobody := netip.AddrPortFrom(s.ControlPlane.Addr4, 9003)
	s.startAgent(t, diverting("nft", "--server", garbage.String(), "--server", other.String(), "--server", nobody.String())...)
	logged(t, s.agent, 0, garbage.String(), "does not speak TLS")
	logged(t, s.agent, 0, other.String(), "certificate")
	logged(t, s.agent, 0, nobody.String(), "refused")
	rises(t, s.agent, `kasway_agent_link_failures_total{step="tls"}`, 0, 2)
	rises(t, s.agent, `kasway_agent_link_failures_total{step="connect"}`, 0, 1)
	for range 5 {
		s.served(t, s.Node, svc4)
	}
	up := 0
	for _, l := range s.status(t).Links {
		if l.State == "up" {
			up++
		} else if l.LastError == "" {
			t.Errorf("status does not say why the link to %s is down", l.Server)
		}
	}
	if up != 1 {
		t.Errorf("%d links are up, want 1", up)
	}
}
