package intercept

import (
	"context"
	"fmt"
	"net"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// States of a TCP socket as TCP_INFO tells them.
const (
	tcpTimeWait  = 6 // both have sent their FIN
	tcpClose     = 7 // reset
	tcpCloseWait = 8 // the peer has sent its FIN
	tcpLastAck   = 9 // the peer first, then we
	tcpClosing   = 11
)

// watchClient returns a ctx that ends with ErrClientGone as its cause when the
// client resets c, or, if quiet is set, when it ends c without having sent
// anything. It reads nothing. stop must be called before anybody reads from c,
// and returns when the watch has ended.
//
// A client that has sent its request and a FIN is not gone: it may wait for the
// answer.
func watchClient(ctx context.Context, c *net.TCPConn, quiet bool) (_ context.Context, stop func(), err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, nil, fmt.Errorf("watching the client: %w", err)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	done := make(chan struct{})
	go func() {
		defer close(done)
		watch(raw, quiet, func() { cancel(ErrClientGone) })
	}()
	return ctx, func() {
		// A deadline in the past wakes the watcher; a closed connection has
		// done so already.
		_ = c.SetReadDeadline(time.Unix(1, 0))
		<-done
		_ = c.SetReadDeadline(time.Time{})
		cancel(nil)
	}, nil
}

// watch returns when the client is gone, having called gone, or when raw's read
// deadline passes.
func watch(raw syscall.RawConn, quiet bool, gone func()) {
	var left bool
	// The poller is edge-triggered: returning false waits for the next thing
	// to happen, although unread bytes lie there.
	err := raw.Read(func(fd uintptr) bool {
		left = isGone(int(fd), quiet)
		return left
	})
	if err == nil && left {
		gone()
	}
}

func isGone(fd int, quiet bool) bool {
	info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
	if err != nil {
		return false
	}
	if info.State != tcpCloseWait || !quiet {
		return info.State == tcpClose
	}
	var b [1]byte
	n, _, err := unix.Recvfrom(fd, b[:], unix.MSG_PEEK|unix.MSG_DONTWAIT)
	return err == nil && n == 0
}
