package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/clientcmd"
)

// An informer is stale after staleAfter without an event, and fresh again with
// the first event that is younger than freshWithin. The object must be written
// more often than that.
const (
	staleAfter  = 2 * time.Second
	freshWithin = 500 * time.Millisecond
)

// line is what informers tells on standard output, one JSON object a line.
type line struct {
	At    time.Time
	Event string // fresh, or dial
	// Informer is which of them became fresh.
	Informer int `json:",omitempty"`
	// Error is why a dial failed: the name of the errno, or the text; "" if it
	// did not.
	Error string `json:",omitempty"`
}

var (
	outMu sync.Mutex
	out   = json.NewEncoder(os.Stdout)
)

func tell(l line) {
	outMu.Lock()
	defer outMu.Unlock()
	l.At = time.Now()
	if err := out.Encode(l); err != nil {
		os.Exit(1)
	}
}

// informers runs client-go informers on one client, all on the ConfigMap "tick"
// of a namespace, whose data.at is the time it was written.
func informers(args []string) error {
	fl := flag.NewFlagSet("informers", flag.ExitOnError)
	kubeconfig := fl.String("kubeconfig", "", "how to reach the KAS")
	count := fl.Int("count", 50, "how many informers")
	namespace := fl.String("namespace", "default", "where the ConfigMap is")
	_ = fl.Parse(args) // it exits by itself
	cfg, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	cfg.QPS, cfg.Burst, cfg.UserAgent = 1000, 1000, "informers"
	cfg.ContentType = "application/vnd.kubernetes.protobuf" // as Kubernetes' own components
	cfg.Dial = dial
	client, err := kubernetes.NewForConfig(cfg)
	if err != nil {
		return err
	}
	var all sync.WaitGroup
	for i := range *count {
		lw := cache.NewListWatchFromClient(client.CoreV1().RESTClient(), "configmaps", *namespace, fields.OneTermEqualSelector("metadata.name", "tick"))
		inf := cache.NewSharedInformer(lw, &corev1.ConfigMap{}, 0)
		f := &freshness{informer: i + 1}
		if _, err := inf.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    f.see,
			UpdateFunc: func(_, now any) { f.see(now) },
		}); err != nil {
			return err
		}
		all.Go(func() { inf.RunWithContext(context.Background()) })
	}
	all.Wait()
	return nil
}

// freshness is what one informer knows of its object; one goroutine calls see.
type freshness struct {
	informer int
	fresh    bool
	last     time.Time
}

func (f *freshness) see(obj any) {
	now := time.Now()
	if now.Sub(f.last) > staleAfter {
		f.fresh = false
	}
	f.last = now
	written, err := time.Parse(time.RFC3339Nano, obj.(*corev1.ConfigMap).Data["at"])
	if err == nil && !f.fresh && now.Sub(written) <= freshWithin {
		f.fresh = true
		tell(line{Event: "fresh", Informer: f.informer})
	}
}

// dial tells how each connect() of the client ended.
func dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second} // client-go's own values
	c, err := d.DialContext(ctx, network, addr)
	l := line{Event: "dial"}
	var errno syscall.Errno
	switch {
	case errors.As(err, &errno):
		l.Error = errnoName(errno)
	case err != nil:
		l.Error = err.Error()
	}
	tell(l)
	return c, err
}

func errnoName(e syscall.Errno) string {
	names := map[syscall.Errno]string{
		syscall.ECONNREFUSED: "ECONNREFUSED", syscall.ECONNRESET: "ECONNRESET", syscall.ETIMEDOUT: "ETIMEDOUT",
		syscall.EPERM: "EPERM", syscall.EACCES: "EACCES", syscall.EHOSTUNREACH: "EHOSTUNREACH", syscall.ENETUNREACH: "ENETUNREACH",
	}
	if n, ok := names[e]; ok {
		return n
	}
	return fmt.Sprintf("errno %d: %v", int(e), e)
}
