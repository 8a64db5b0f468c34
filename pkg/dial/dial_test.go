package dial

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair is a TCP connection over loopback: what the test plays, and the end
// that is handed to Pipe.
func pair(t *testing.T) (*net.TCPConn, *TCP) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	outer, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	inner, err := l.Accept()
	if err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(10 * time.Second)
	_ = outer.SetDeadline(deadline)
	t.Cleanup(func() { outer.Close() })
	return outer.(*net.TCPConn), NewTCP(inner.(*net.TCPConn))
}

// piped is client <-> Pipe <-> server, and the channel Pipe's result comes on.
func piped(t *testing.T) (client, server *net.TCPConn, result chan Result) {
	t.Helper()
	client, a := pair(t)
	server, b := pair(t)
	result = make(chan Result, 1)
	go func() { result <- Pipe(a, b) }()
	t.Cleanup(func() { _, _ = client.Close(), server.Close() })
	return client, server, result
}

func TestPipeHalfClose(t *testing.T) {
	big := make([]byte, 5<<20)
	_, _ = rand.Read(big)
	for _, clientFirst := range []bool{true, false} {
		t.Run(fmt.Sprintf("clientFirst=%v", clientFirst), func(t *testing.T) {
			first, second, result := piped(t)
			if !clientFirst {
				first, second = second, first
			}
			if _, err := first.Write([]byte("request")); err != nil {
				t.Fatal(err)
			}
			if err := first.CloseWrite(); err != nil {
				t.Fatal(err)
			}
			// The end arrives while the other direction is still silent.
			got, err := io.ReadAll(second)
			if err != nil || string(got) != "request" {
				t.Fatalf("read %q, %v", got, err)
			}
			go func() {
				_, _ = second.Write(big)
				_ = second.Close()
			}()
			got, err = io.ReadAll(first)
			if err != nil || !bytes.Equal(got, big) {
				t.Fatalf("after the half-close: %d bytes of %d, %v", len(got), len(big), err)
			}
			r := <-result
			want := [2]int64{7, int64(len(big))}
			if !clientFirst {
				want[0], want[1] = want[1], want[0]
			}
			if r.Err != nil || [2]int64{r.FromA, r.FromB} != want {
				t.Errorf("result %+v, want %v", r, want)
			}
		})
	}
}

func TestPipeCarriesReset(t *testing.T) {
	for _, fromClient := range []bool{true, false} {
		from, to, result := piped(t)
		if !fromClient {
			from, to = to, from
		}
		if _, err := from.Write([]byte("x")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(to, make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
		_ = from.SetLinger(0)
		_ = from.Close()
		if _, err := to.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("fromClient=%v: the far side reads %v, want ECONNRESET", fromClient, err)
		}
		if r := <-result; !errors.Is(r.Err, syscall.ECONNRESET) {
			t.Errorf("fromClient=%v: Pipe ends with %v, want ECONNRESET", fromClient, r.Err)
		}
	}
}

func TestAbortIsReset(t *testing.T) {
	outer, inner := pair(t)
	inner.Abort(nil)
	inner.Abort(nil)
	if err := inner.Close(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("Close after Abort: %v, want net.ErrClosed", err)
	}
	if _, err := outer.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("after Abort the peer reads %v, want ECONNRESET", err)
	}

	outer, inner = pair(t)
	_, _ = inner.Write([]byte("last"))
	_ = inner.Close()
	inner.Abort(nil) // after Close: the queued bytes must still arrive
	if got, err := io.ReadAll(outer); err != nil || string(got) != "last" {
		t.Errorf("after Close and Abort the peer reads %q, %v", got, err)
	}
}

// What a killed process leaves to the kernel is a close without Close.
func TestDeathIsReset(t *testing.T) {
	outer, inner := pair(t)
	_ = inner.TCPConn.Close()
	if _, err := outer.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("when the process dies the peer reads %v, want ECONNRESET", err)
	}
}

func TestDirect(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	direct := Direct(&net.Dialer{Timeout: time.Second})
	c, err := direct(context.Background(), Target{Name: l.Addr().String()})
	if err != nil {
		t.Fatal(err)
	}
	_ = c.Close()
	_ = l.Close()
	if _, err := direct(context.Background(), Target{Name: l.Addr().String()}); !errors.Is(err, ErrRefused) {
		t.Errorf("closed port: %v, want ErrRefused", err)
	}
}

func TestClassify(t *testing.T) {
	for _, c := range []struct {
		in, want error
	}{
		{&net.OpError{Op: "dial", Err: os.NewSyscallError("connect", syscall.ECONNREFUSED)}, ErrRefused},
		{syscall.EHOSTUNREACH, ErrUnreachable},
		{syscall.ENETUNREACH, ErrUnreachable},
		{syscall.ETIMEDOUT, ErrTimeout},
		{context.DeadlineExceeded, ErrTimeout},
		{os.ErrDeadlineExceeded, ErrTimeout},
		{&net.DNSError{IsNotFound: true}, ErrUnreachable},
		{&net.DNSError{IsTimeout: true}, ErrTimeout},
		{syscall.EMFILE, ErrLimit},
		{fmt.Errorf("guard: %w", ErrDenied), ErrDenied},
		{io.ErrUnexpectedEOF, io.ErrUnexpectedEOF},
		{nil, nil},
	} {
		got := Classify(c.in)
		if !errors.Is(got, c.want) || !errors.Is(got, c.in) {
			t.Errorf("Classify(%v) = %v, want it to be %v and itself", c.in, got, c.want)
		}
	}
	for err, want := range map[error]bool{ErrNoLink: true, ErrNoUpstream: true, ErrLimit: true, ErrRefused: false, ErrLost: false} {
		if NotDialled(err) != want {
			t.Errorf("NotDialled(%v) = %v", err, !want)
		}
	}
}
