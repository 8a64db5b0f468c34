package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"
)

// requestTime is what one request may take.
const requestTime = 10 * time.Second

// A pod under load asks loaders at a time, each again after loadPause.
const (
	loaders   = 2
	loadPause = 50 * time.Millisecond
)

// given is the KAS's address that every pod is given.
func given() string {
	return "https://" + net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))
}

// kubeget asks the KAS once a second with the pod's token, at the address that
// the pod was given and at each of urls, and logs one line for each answer.
func kubeget(path string, urls []string) {
	urls = append([]string{given()}, urls...)
	for {
		for _, u := range urls {
			if status, err := get(u + path); err != nil {
				log.Printf("FAIL %s %v", u, err)
			} else {
				log.Printf("OK %s %s", u, status)
			}
		}
		time.Sleep(time.Second)
	}
}

// watch keeps a watch, for ever.
func watch(path string) {
	for {
		resp, err := ask(context.Background(), given()+path)
		if err == nil {
			_, err = io.Copy(io.Discard, resp.Body)
			resp.Body.Close()
		}
		log.Printf("WATCH %s ended: %v", path, err)
		time.Sleep(time.Second)
	}
}

// load asks as kubeget does, all the time, and logs every failure, and once a
// second how many requests succeeded and failed since the start, and the longest
// that one took since the line before.
func load(path string, urls []string) {
	urls = append([]string{given()}, urls...)
	var (
		mu         sync.Mutex
		ok, failed int
		slowest    time.Duration
	)
	for range loaders {
		go func() {
			for i := 0; ; i++ {
				u, began := urls[i%len(urls)], time.Now()
				status, err := get(u + path)
				took := time.Since(began)
				good := err == nil && strings.HasPrefix(status, "200 ")
				if !good {
					log.Printf("FAIL %s %q %v after %v", u, status, err, took)
				}
				mu.Lock()
				if good {
					ok++
				} else {
					failed++
				}
				slowest = max(slowest, took)
				mu.Unlock()
				time.Sleep(loadPause)
			}
		}()
	}
	for range time.Tick(time.Second) {
		mu.Lock()
		log.Printf("LOAD ok %d failed %d slowest %d ms", ok, failed, slowest.Milliseconds())
		slowest = 0
		mu.Unlock()
	}
}

// get is one request with a new connection.
func get(url string) (status string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), requestTime)
	defer cancel()
	resp, err := ask(ctx, url)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.Status, err
}

// ask verifies the KAS by the name that it has in every cluster, not by the
// address. The caller closes the answer's body, and with it the connection.
func ask(ctx context.Context, url string) (*http.Response, error) {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	token, err := os.ReadFile(account + "token")
	if err != nil {
		return nil, err
	}
	pem, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		return nil, err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	client := &http.Client{Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{RootCAs: pool, ServerName: "kubernetes.default.svc"},
	}}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	return client.Do(req)
}
