package kas

import (
	"bufio"
	"context"
	"crypto/rand"
	"crypto/sha256"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
)

// DialFunc opens TCP connections, from a host of a laboratory for example.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// Client speaks to a Server, verifying its certificate. It is safe for
// concurrent use.
type Client struct {
	// Base is the URL that requests go to, such as https://10.96.0.1:443.
	Base string

	dial  DialFunc
	roots *x509.CertPool
	http  *http.Client
}

// NewClient makes a client of the server at base. Without http2 it speaks
// HTTP/1.1.
func NewClient(base string, ca []byte, dial DialFunc, http2 bool) (*Client, error) {
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM(ca) {
		return nil, errors.New("kas: the CA is no certificate")
	}
	var protocols http.Protocols
	protocols.SetHTTP1(!http2)
	protocols.SetHTTP2(http2)
	return &Client{Base: base, dial: dial, roots: roots, http: &http.Client{Transport: &http.Transport{
		DialContext: dial, TLSClientConfig: &tls.Config{RootCAs: roots, MinVersion: tls.VersionTLS12}, Protocols: &protocols}}}, nil
}

// Close closes idle connections; those in use end with their requests.
func (c *Client) Close() { c.http.CloseIdleConnections() }

// Get returns the body of a GET, which must be answered 200.
func (c *Client) Get(ctx context.Context, path string) (string, error) {
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	return string(body), err
}

func (c *Client) do(ctx context.Context, method, path string, body io.Reader) (*http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, c.Base+path, body)
	if err != nil {
		return nil, err
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("kas: %s %s: %s", method, path, resp.Status)
	}
	return resp, nil
}

// Version is the server's gitVersion.
func (c *Client) Version(ctx context.Context) (string, error) {
	body, err := c.Get(ctx, "/version")
	if err != nil {
		return "", err
	}
	var v struct{ GitVersion string }
	if err := json.Unmarshal([]byte(body), &v); err != nil {
		return "", fmt.Errorf("kas: /version: %w", err)
	}
	return v.GitVersion, nil
}

// WhoAmI is this client's address as the server sees it.
func (c *Client) WhoAmI(ctx context.Context) (string, error) {
	body, err := c.Get(ctx, "/whoami")
	return strings.TrimSpace(body), err
}

// Watch opens a watch. query is as in a URL ("count=3&interval=50ms"), or empty.
func (c *Client) Watch(ctx context.Context, query string) (*Watch, error) {
	resp, err := c.do(ctx, http.MethodGet, "/api/v1/watch?"+query, nil)
	if err != nil {
		return nil, err
	}
	return &Watch{Proto: resp.Proto, body: resp.Body, events: json.NewDecoder(resp.Body)}, nil
}

// Watch is an open watch.
type Watch struct {
	// Proto is "HTTP/1.1" or "HTTP/2.0".
	Proto  string
	body   io.Closer
	events *json.Decoder
}

// Next waits for an event; io.EOF is a clean end.
func (w *Watch) Next() (e Event, err error) { return e, w.events.Decode(&e) }

// Close ends the watch.
func (w *Watch) Close() error { return w.body.Close() }

// Download fetches n bytes and checks their number and hash.
func (c *Client) Download(ctx context.Context, n int64) error {
	resp, err := c.do(ctx, http.MethodGet, fmt.Sprintf("/bytes?n=%d", n), nil)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	sum := sha256.New()
	got, err := io.Copy(sum, resp.Body)
	if err != nil {
		return fmt.Errorf("kas: %d of %d bytes: %w", got, n, err)
	}
	if want, have := resp.Trailer.Get(shaTrailer), hex.EncodeToString(sum.Sum(nil)); got != n || have != want {
		return fmt.Errorf("kas: got %d bytes with hash %s, want %d with %s", got, have, n, want)
	}
	return nil
}

// Upload sends n random bytes and checks what the server says it received.
func (c *Client) Upload(ctx context.Context, n int64) error {
	sum := sha256.New()
	resp, err := c.do(ctx, http.MethodPut, "/sink", io.TeeReader(io.LimitReader(rand.Reader, n), sum))
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	var r Received
	if err := json.NewDecoder(resp.Body).Decode(&r); err != nil {
		return fmt.Errorf("kas: /sink: %w", err)
	}
	if want := (Received{n, hex.EncodeToString(sum.Sum(nil))}); r != want {
		return fmt.Errorf("kas: the server received %+v, want %+v", r, want)
	}
	return nil
}

// Exec upgrades a connection as kubectl exec does.
func (c *Client) Exec(ctx context.Context) (*Exec, error) {
	u, err := url.Parse(c.Base)
	if err != nil {
		return nil, err
	}
	port := u.Port()
	if port == "" {
		port = "443"
	}
	raw, err := c.dial(ctx, "tcp", net.JoinHostPort(u.Hostname(), port))
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, &tls.Config{RootCAs: c.roots, ServerName: u.Hostname(), MinVersion: tls.VersionTLS12, NextProtos: []string{"http/1.1"}})
	e := &Exec{Conn: conn, in: bufio.NewReader(conn)}
	if err := e.upgrade(ctx, u.Host); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("kas: upgrading: %w", err)
	}
	return e, nil
}

// Exec is an upgraded connection, at whose other end is an echo.
type Exec struct {
	*tls.Conn
	in *bufio.Reader
}

func (e *Exec) upgrade(ctx context.Context, host string) error {
	stop := context.AfterFunc(ctx, func() { e.NetConn().Close() })
	defer stop()
	_, err := fmt.Fprintf(e, "POST /api/v1/namespaces/default/pods/demo/exec?command=cat&stdin=true&stdout=true HTTP/1.1\r\n"+
		"Host: %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nX-Stream-Protocol-Version: v4.channel.k8s.io\r\n\r\n", host)
	if err != nil {
		return err
	}
	resp, err := http.ReadResponse(e.in, nil)
	if err != nil {
		return err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		return errors.New(resp.Status)
	}
	return nil
}

// Read reads what the echo returns.
func (e *Exec) Read(p []byte) (int, error) { return e.in.Read(p) }

// Echo sends data, ends this direction, and checks that all of it comes back,
// followed by the server's own words after our end.
func (e *Exec) Echo(data []byte) error {
	sent := make(chan error, 1)
	go func() {
		_, err := e.Write(data)
		sent <- errors.Join(err, e.CloseWrite())
	}()
	got, err := io.ReadAll(e)
	if err := errors.Join(err, <-sent); err != nil {
		return fmt.Errorf("kas: echo: %d bytes of %d came back: %w", len(got), len(data), err)
	}
	if want := string(data) + fmt.Sprintf(farewell, len(data)); string(got) != want {
		return fmt.Errorf("kas: echo: %d bytes came back, want the %d sent and the server's farewell", len(got), len(data))
	}
	return nil
}
