// Box is the program of the test cluster's pods, and of their sandboxes.
package main

import (
	"context"
	"fmt"
	"log"
	"net/http"
	"os"
	"os/signal"
	"syscall"
)

const usage = `usage: box
       box serve ADDR
       box kubeget [-watch PATH] PATH [URL...]
       box load PATH [URL...]`

func main() {
	args := os.Args[1:]
	switch {
	case len(args) == 0:
		pause()
	case len(args) == 2 && args[0] == "serve":
		log.Fatal(serve(args[1]))
	case len(args) >= 4 && args[0] == "kubeget" && args[1] == "-watch":
		go watch(args[2])
		kubeget(args[3], args[4:])
	case len(args) >= 2 && args[0] == "kubeget":
		kubeget(args[1], args[2:])
	case len(args) >= 2 && args[0] == "load":
		load(args[1], args[2:])
	default:
		log.Fatal(usage)
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
