package kas

import (
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	stdlog "log"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"time"

	"github.com/kasway/kasway/pkg/certs"
)

// Config says under which names the server's certificate is valid.
type Config struct {
	// Names and Addresses: at least one of either.
	Names     []string
	Addresses []netip.Addr
	// Interval between two events of a watch; 0 means a second.
	Interval time.Duration
}

// Server is one stand-in, on any number of listeners.
type Server struct {
	ca       []byte
	interval time.Duration
	http     *http.Server

	mu       sync.Mutex
	upgraded map[net.Conn]bool // nil once closed
	wg       sync.WaitGroup    // of upgraded connections
}

// New makes a server with a new authority.
func New(cfg Config) (*Server, error) {
	const validity = 24 * time.Hour
	authority, err := certs.NewAuthority("kas", validity)
	if err != nil {
		return nil, fmt.Errorf("kas: %w", err)
	}
	pair, err := authority.IssueServer(certs.ServerRequest{DNS: cfg.Names, IPs: cfg.Addresses, Validity: validity})
	if err != nil {
		return nil, fmt.Errorf("kas: %w", err)
	}
	cert, err := tls.X509KeyPair(pair.CertPEM, pair.KeyPEM)
	if err != nil {
		return nil, fmt.Errorf("kas: %w", err)
	}
	s := &Server{ca: authority.CertPEM, interval: cfg.Interval, upgraded: map[net.Conn]bool{}}
	if s.interval == 0 {
		s.interval = time.Second
	}
	s.http = &http.Server{
		Handler:           s.handler(),
		TLSConfig:         &tls.Config{Certificates: []tls.Certificate{cert}, MinVersion: tls.VersionTLS12},
		ReadHeaderTimeout: 10 * time.Second,
		// Probes that connect and leave would fill the log.
		ErrorLog: stdlog.New(io.Discard, "", 0),
	}
	return s, nil
}

// CA is the certificate, as PEM, that clients verify the server by.
func (s *Server) CA() []byte { return s.ca }

// Serve takes ownership of l and serves on it until Close.
func (s *Server) Serve(l net.Listener) error {
	err := s.http.ServeTLS(l, "", "")
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// Close ends all listeners and connections, upgraded ones too.
func (s *Server) Close() error {
	err := s.http.Close()
	s.mu.Lock()
	upgraded := s.upgraded
	s.upgraded = nil
	s.mu.Unlock()
	for c := range upgraded {
		c.Close()
	}
	s.wg.Wait()
	return err
}

func (s *Server) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /version", func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"major":"1","minor":"35","gitVersion":"v1.35.0-standin","platform":"linux/amd64"}`+"\n")
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "ok") })
	mux.HandleFunc("GET /whoami", func(w http.ResponseWriter, r *http.Request) { _, _ = io.WriteString(w, r.RemoteAddr+"\n") })
	mux.HandleFunc("GET /api/v1/watch", s.watch)
	mux.HandleFunc("GET /bytes", sendBytes)
	mux.HandleFunc("/sink", sink)
	mux.HandleFunc("/api/v1/namespaces/{namespace}/pods/{pod}/exec", s.exec)
	return mux
}
