// Box is the program of the test cluster's pods, and of their sandboxes.
package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"os"
	"os/signal"
	"strings"
	"syscall"
	"time"
)

func main() {
	args := os.Args[1:]
	switch {
	case len(args) == 0:
		pause()
	case len(args) == 2 && args[0] == "serve":
		log.Fatal(serve(args[1]))
	case len(args) >= 2 && args[0] == "kubeget":
		kubeget(args[1], args[2:])
	default:
		log.Fatal("usage: box | box serve ADDR | box kubeget PATH [URL...]")
	}
}

// pause holds a pod's namespaces and reaps what its containers leave.
func pause() {
	signal.Ignore(syscall.SIGCHLD) // children are reaped by the kernel
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	<-ctx.Done()
}

func serve(addr string) error {
	return http.ListenAndServe(addr, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		_, _ = fmt.Fprintf(w, "hello %s %s from %s\n", r.Method, r.URL, r.RemoteAddr)
	}))
}

// kubeget asks the KAS once a second with the pod's token, at the address that
// the pod was given and at each of urls, and logs one line for each answer.
func kubeget(path string, urls []string) {
	urls = append([]string{"https://" + net.JoinHostPort(os.Getenv("KUBERNETES_SERVICE_HOST"), os.Getenv("KUBERNETES_SERVICE_PORT"))}, urls...)
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

// get verifies the KAS by the name that it has in every cluster, not by the
// address, and makes a new connection each time.
func get(url string) (status string, err error) {
	const account = "/var/run/secrets/kubernetes.io/serviceaccount/"
	token, err := os.ReadFile(account + "token")
	if err != nil {
		return "", err
	}
	pem, err := os.ReadFile(account + "ca.crt")
	if err != nil {
		return "", err
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	client := &http.Client{Timeout: 10 * time.Second, Transport: &http.Transport{
		DisableKeepAlives: true,
		TLSClientConfig:   &tls.Config{RootCAs: pool, ServerName: "kubernetes.default.svc"},
	}}
	req, err := http.NewRequest(http.MethodGet, url, nil)
	if err != nil {
		return "", err
	}
	req.Header.Set("Authorization", "Bearer "+strings.TrimSpace(string(token)))
	resp, err := client.Do(req)
	if err != nil {
		return "", err
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return resp.Status, err
}
