package stories

import (
	"bytes"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"

	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// raw connects from the node to the agents' port.
func (s *scene) raw(t *testing.T) net.Conn {
	t.Helper()
	c, err := s.Node.Dial(t.Context(), "tcp", s.At.String())
	if err != nil {
		t.Fatal(err)
	}
	deadline(t, c, patience)
	return c
}

// clientTLS is an agent's, with another certificate (nil: none).
func (s *scene) clientTLS(t *testing.T, pair *certs.Pair) *tls.Config {
	t.Helper()
	cfg := &tls.Config{ServerName: s.At.Addr().String(), RootCAs: x509.NewCertPool(), NextProtos: []string{tunnelpb.ALPN}, MinVersion: tls.VersionTLS12}
	cfg.RootCAs.AddCert(s.Authority.Certificate)
	if pair != nil {
		cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
		if err != nil {
			t.Fatal(err)
		}
		// Also where the server says that it does not know the CA.
		cfg.GetClientCertificate = func(*tls.CertificateRequestInfo) (*tls.Certificate, error) { return &cert, nil }
	}
	return cfg
}

// member issues a certificate as agents have.
func (s *scene) member(t *testing.T, by *certs.Authority, validity time.Duration) *certs.Pair {
	t.Helper()
	p, err := by.IssueAgent(certs.AgentRequest{Name: "mallory", TrustDomain: "kasway", Validity: validity})
	if err != nil {
		t.Fatal(err)
	}
	return &p
}

// handshake tries TLS and returns what became of it: TLS 1.3 tells a client
// only when it reads that it is refused.
func handshake(c net.Conn, cfg *tls.Config) error {
	conn := tls.Client(c, cfg)
	if err := conn.Handshake(); err != nil {
		return err
	}
	_, err := conn.Read(make([]byte, 1))
	return err
}

// peer speaks HTTP/2 to the agents' port frame by frame.
type peer struct {
	conn   *tls.Conn
	framer *http2.Framer
	fields bytes.Buffer
	coder  *hpack.Encoder
}

// newPeer connects with a good certificate and sends HTTP/2's preface.
func (s *scene) newPeer(t *testing.T, pair *certs.Pair) *peer {
	t.Helper()
	p := &peer{conn: tls.Client(s.raw(t), s.clientTLS(t, pair))}
	p.coder = hpack.NewEncoder(&p.fields)
	p.framer = http2.NewFramer(p.conn, p.conn)
	p.framer.ReadMetaHeaders = hpack.NewDecoder(4096, nil)
	if _, err := io.WriteString(p.conn, http2.ClientPreface); err != nil {
		t.Fatal(err)
	}
	if err := p.framer.WriteSettings(); err != nil {
		t.Fatal(err)
	}
	return p
}

// call opens the stream 1 with a gRPC request and, if there is one, a message.
// What the server refuses early shows in the answer.
func (p *peer) call(method string, message []byte, metadata ...string) {
	field := func(name, value string) { _ = p.coder.WriteField(hpack.HeaderField{Name: name, Value: value}) }
	field(":method", "POST")
	field(":scheme", "https")
	field(":path", method)
	field(":authority", "server")
	field("content-type", "application/grpc+"+tunnelpb.ContentSubtype)
	field("te", "trailers")
	for i := 0; i < len(metadata); i += 2 {
		field(metadata[i], metadata[i+1])
	}
	block := p.fields.Bytes()
	const most = 16 << 10
	first := min(len(block), most)
	_ = p.framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block[:first], EndHeaders: first == len(block)})
	for block = block[first:]; len(block) > 0; block = block[min(len(block), most):] {
		_ = p.framer.WriteContinuation(1, len(block) <= most, block[:min(len(block), most)])
	}
	if message != nil {
		_ = p.framer.WriteData(1, false, message)
	}
}

// answer waits for the end of the stream 1, or of the connection.
func (p *peer) answer() string {
	for {
		frame, err := p.framer.ReadFrame()
		var stream http2.StreamError
		switch {
		case errors.As(err, &stream):
			continue
		case err != nil:
			return "closed: " + err.Error()
		}
		switch f := frame.(type) {
		case *http2.MetaHeadersFrame:
			var status []string
			for _, h := range f.Fields {
				if h.Name == ":status" || strings.HasPrefix(h.Name, "grpc-status") || h.Name == "grpc-message" {
					status = append(status, h.Name+"="+h.Value)
				}
			}
			if f.StreamEnded() {
				return strings.Join(status, " ")
			}
		case *http2.RSTStreamFrame:
			return "reset: " + f.ErrCode.String()
		case *http2.GoAwayFrame:
			return "goaway: " + f.ErrCode.String()
		case *http2.SettingsFrame:
			if !f.IsAck() {
				_ = p.framer.WriteSettingsAck()
			}
		case *http2.PingFrame:
			_ = p.framer.WritePing(true, f.Data)
		}
	}
}

func (p *peer) close() { shut(p.conn) }

// binary is binary metadata as gRPC writes it.
func binary(b []byte) string { return base64.RawStdEncoding.EncodeToString(b) }

// announced is a gRPC message of n bytes, of which only the length is sent.
func announced(n uint32) []byte {
	return []byte{0, byte(n >> 24), byte(n >> 16), byte(n >> 8), byte(n)}
}

// field is a protobuf field of bytes.
func field(number int, value string) []byte {
	b := []byte{byte(number<<3 | 2)}
	for n := len(value); ; n >>= 7 {
		if n < 0x80 {
			b = append(b, byte(n))
			break
		}
		b = append(b, byte(n)|0x80)
	}
	return append(b, value...)
}

func openOf(id, target string) string { return binary(append(field(1, id), field(2, target)...)) }
