package bed

import (
	"bytes"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"time"
)

// API is the administrator's access to the KAS, from inside the control plane.
type API struct{ client *http.Client }

// API is the bed's; it exists after Up.
func (b *Bed) API() *API { return b.api }

func (b *Bed) newAPI() (*API, error) {
	cert, err := tls.LoadX509KeyPair(b.Path("pki/client-admin.crt"), b.Path("pki/client-admin.key"))
	if err != nil {
		return nil, err
	}
	ca, err := os.ReadFile(b.Path("pki/ca.crt"))
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	return &API{&http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{cert}},
		DialContext: func(ctx context.Context, network, addr string) (net.Conn, error) {
			return dialIn(ctx, nsCP, network, addr)
		},
	}}}, nil
}

// Get reads path into out (nil: only its status counts).
func (a *API) Get(ctx context.Context, path string, out any) error {
	return a.do(ctx, http.MethodGet, path, "", nil, out)
}

// Create posts an object, in JSON or YAML, to the path of its kind.
func (a *API) Create(ctx context.Context, path string, object []byte) error {
	return a.do(ctx, http.MethodPost, path, "application/yaml", object, nil)
}

// Merge applies a JSON merge patch to the object at path.
func (a *API) Merge(ctx context.Context, path string, patch []byte) error {
	return a.do(ctx, http.MethodPatch, path, "application/merge-patch+json", patch, nil)
}

func (a *API) do(ctx context.Context, method, path, kind string, body []byte, out any) error {
	req, err := http.NewRequestWithContext(ctx, method, kasURL("127.0.0.1", kasPort)+path, bytes.NewReader(body))
	if err != nil {
		return err
	}
	if kind != "" {
		req.Header.Set("Content-Type", kind)
	}
	resp, err := a.client.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	text, err := io.ReadAll(resp.Body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return fmt.Errorf("%s %s: %s: %s", method, path, resp.Status, bytes.TrimSpace(text))
	}
	if out == nil {
		return nil
	}
	return json.Unmarshal(text, out)
}
