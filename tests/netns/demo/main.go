// Command demo shows Kasway's main job in network namespaces of its own: a node
// and two pods that can reach nothing but the server's port use a KAS as if it
// were there. It ends with "demo: ok", or says which step failed.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

func main() {
	bin := flag.String("bin", "bin", "folder of kasway-agent and kasway-server")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	d := &demo{ctx: ctx, bin: *bin, start: time.Now()}
	err := errors.Join(d.run(), d.close())
	if err != nil {
		fmt.Fprintln(os.Stderr, "demo: FAILED:", err)
		os.Exit(1)
	}
	fmt.Println("demo: ok")
}

// step runs f and prints what it has shown.
func (d *demo) step(what string, f func() (string, error)) error {
	if err := d.ctx.Err(); err != nil {
		return fmt.Errorf("%s: interrupted", what)
	}
	begun := time.Now()
	detail, err := f()
	if err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	fmt.Printf("%5.1fs  %-58s %6s  %s\n", time.Since(d.start).Seconds(), what, time.Since(begun).Round(time.Millisecond), detail)
	return nil
}

func (d *demo) run() error {
	fmt.Println("A node and two pods; their ranges overlap the control plane's. Only the server's port is open.")
	for _, s := range []struct {
		what string
		f    func() (string, error)
	}{
		{"control plane, node, two pods", d.buildTopology},
		{"without a firewall the KAS can be reached", d.reachable},
		{"firewall: only the server's port, both ways", d.shut},
		{"now nobody on the node reaches the KAS", d.unreachable},
		{"certificates by kasway-server certs, server started", d.startServer},
		{"agent started, mode chosen and proven", d.startAgent},
		{"/version from host and pods, v4 and v6, verified", d.versions},
		{"the same by curl, on the node", d.curl},
		{"watches held from host and pods", d.holdWatches},
		{"what the agent has installed (kasway-agent rules)", d.rules},
		{"kill -9 of the agent: what clients see", d.kill},
		{"the next agent takes over", d.startAgent},
		{"/version again, from everywhere", d.versions},
		{"cleanup, twice; the node is as it was before", d.cleanup},
	} {
		if err := d.step(s.what, s.f); err != nil {
			return err
		}
	}
	return nil
}
