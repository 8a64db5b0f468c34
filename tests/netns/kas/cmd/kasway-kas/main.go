// Command kasway-kas is the stand-in KAS of the demo and the tests; package
// kas says what it serves.
package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/spf13/pflag"

	"github.com/kasway/kasway/tests/netns/kas"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	err := run(ctx, os.Args[1:])
	switch {
	case errors.Is(err, pflag.ErrHelp):
	case errors.Is(err, errUsage):
		fmt.Fprintln(os.Stderr, "kasway-kas:", err)
		os.Exit(2)
	case err != nil:
		fmt.Fprintln(os.Stderr, "kasway-kas:", err)
		os.Exit(1)
	}
}

var errUsage = errors.New("usage")

func run(ctx context.Context, args []string) error {
	flags := pflag.NewFlagSet("kasway-kas", pflag.ContinueOnError)
	listen := flags.StringArray("listen", nil, "address to serve on, such as 172.30.0.10:6443 (repeatable)")
	names := flags.StringArray("name", []string{"kubernetes.default.svc"}, "DNS name of the certificate (repeatable)")
	also := flags.StringArray("address", nil, "IP address of the certificate besides those served on (repeatable)")
	ca := flags.String("ca-out", "", "file that the CA certificate is written to")
	interval := flags.Duration("interval", time.Second, "time between two events of a watch")
	if err := flags.Parse(args); err != nil {
		if errors.Is(err, pflag.ErrHelp) {
			return err
		}
		return fmt.Errorf("%w: %w", errUsage, err)
	}
	if len(*listen) == 0 {
		return fmt.Errorf("%w: --listen is needed", errUsage)
	}
	cfg := kas.Config{Names: *names, Interval: *interval}
	for _, a := range *also {
		ip, err := netip.ParseAddr(a)
		if err != nil {
			return fmt.Errorf("%w: --address: %w", errUsage, err)
		}
		cfg.Addresses = append(cfg.Addresses, ip)
	}
	for _, l := range *listen {
		ap, err := netip.ParseAddrPort(l)
		if err != nil {
			return fmt.Errorf("%w: --listen: %w", errUsage, err)
		}
		cfg.Addresses = append(cfg.Addresses, ap.Addr())
	}
	return serve(ctx, cfg, *listen, *ca)
}

func serve(ctx context.Context, cfg kas.Config, listen []string, ca string) error {
	server, err := kas.New(cfg)
	if err != nil {
		return err
	}
	if ca != "" {
		if err := os.WriteFile(ca, server.CA(), 0o644); err != nil {
			return err
		}
	}
	ended := make(chan error, len(listen))
	started := 0
	for _, addr := range listen {
		l, err := net.Listen("tcp", addr)
		if err != nil {
			return errors.Join(err, server.Close())
		}
		started++
		go func() { ended <- server.Serve(l) }()
		fmt.Println("kasway-kas: serving on", addr)
	}
	select {
	case <-ctx.Done():
	case err = <-ended:
		started--
	}
	err = errors.Join(err, server.Close())
	for range started {
		err = errors.Join(err, <-ended)
	}
	return err
}
