package main

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"time"

	"golang.org/x/sys/unix"
)

// What a client can be asked to time.
const (
	opRefused = "refused" // connect() that is refused, N times: median ns
	opConnect = "connect" // connect() and one byte back, N times: median ns
	opRTT     = "rtt"     // 64 bytes there and back, N times: median ns
	opStream  = "stream"  // as many bytes as go in N ms: bytes per second
)

type clientRequest struct {
	Op   string
	Addr netip.AddrPort
	N    int
}

// The first byte of a connection says what its server is to do.
const (
	echoes   = 'e'
	discards = 'd'
)

const roundTripBytes = 64

// runClient is the role "client". It uses system calls on blocking sockets: the
// network poller of package net costs several times what is measured here.
func runClient() error {
	return answerAll(func(q clientRequest) (float64, error) {
		switch q.Op {
		case opRefused:
			return timed(q.N, func() error { return refused(q.Addr) })
		case opConnect:
			return timed(q.N, func() error { return connectAndEcho(q.Addr) })
		case opRTT:
			return roundTrips(q.Addr, q.N)
		case opStream:
			return stream(q.Addr, time.Duration(q.N)*time.Millisecond)
		}
		return 0, fmt.Errorf("no such request: %s", q.Op)
	})
}

// timed is the median of n runs in nanoseconds.
func timed(n int, once func() error) (float64, error) {
	all := make([]time.Duration, n)
	for i := range all {
		start := time.Now()
		if err := once(); err != nil {
			return 0, err
		}
		all[i] = time.Since(start)
	}
	slices.Sort(all)
	return float64(all[n/2].Nanoseconds()), nil
}

// dial connects a blocking socket that is reset when it is closed, so that
// thousands leave no port in TIME_WAIT.
func dial(to netip.AddrPort) (int, error) {
	family, sa := unix.AF_INET6, unix.Sockaddr(&unix.SockaddrInet6{Port: int(to.Port()), Addr: to.Addr().As16()})
	if to.Addr().Is4() {
		family, sa = unix.AF_INET, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()}
	}
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	linger := unix.Linger{Onoff: 1}
	if err := errors.Join(unix.SetsockoptLinger(fd, unix.SOL_SOCKET, unix.SO_LINGER, &linger), unix.Connect(fd, sa)); err != nil {
		_ = unix.Close(fd) // it was never connected
		return -1, err
	}
	return fd, nil
}

func refused(to netip.AddrPort) error {
	fd, err := dial(to)
	switch {
	case err == nil:
		return errors.Join(fmt.Errorf("%s was to refuse, and did not", to), unix.Close(fd))
	case !errors.Is(err, unix.ECONNREFUSED):
		return fmt.Errorf("connecting to %s: %w", to, err)
	}
	return nil
}

func connectAndEcho(to netip.AddrPort) error {
	fd, err := dial(to)
	if err != nil {
		return fmt.Errorf("connecting to %s: %w", to, err)
	}
	return errors.Join(roundTrip(fd, []byte{echoes}), unix.Close(fd))
}

// roundTrip writes b and reads as many bytes.
func roundTrip(fd int, b []byte) error {
	if _, err := unix.Write(fd, b); err != nil {
		return err
	}
	for got := 0; got < len(b); {
		n, err := unix.Read(fd, b[got:])
		if err != nil {
			return err
		}
		if n == 0 {
			return errors.New("the server ended")
		}
		got += n
	}
	return nil
}

func roundTrips(to netip.AddrPort, n int) (float64, error) {
	fd, err := dial(to)
	if err != nil {
		return 0, fmt.Errorf("connecting to %s: %w", to, err)
	}
	defer func() { _ = unix.Close(fd) }()
	message := make([]byte, roundTripBytes)
	message[0] = echoes
	return timed(n, func() error { return roundTrip(fd, message) })
}

// stream counts what the socket took in d; what it still buffers then is small
// beside that.
func stream(to netip.AddrPort, d time.Duration) (float64, error) {
	fd, err := dial(to)
	if err != nil {
		return 0, fmt.Errorf("connecting to %s: %w", to, err)
	}
	defer func() { _ = unix.Close(fd) }()
	block := make([]byte, 256<<10)
	block[0] = discards
	start, total := time.Now(), 0
	for time.Since(start) < d {
		n, err := unix.Write(fd, block)
		if err != nil {
			return 0, err
		}
		total += n
	}
	return float64(total) / time.Since(start).Seconds(), nil
}
