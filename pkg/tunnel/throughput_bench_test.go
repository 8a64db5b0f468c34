package tunnel

import (
	"context"
	"io"
	"net"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// Bytes from the target to a client over a loopback link, both pipes in this
// process.
func BenchmarkThroughput_Down(b *testing.B) { throughput(b, true) }
func BenchmarkThroughput_Up(b *testing.B)   { throughput(b, false) }

func throughput(b *testing.B, down bool) {
	const size = 64 << 20
	ends := make(chan *net.TCPConn, 1)
	bench := newBench(b, func(context.Context, dial.Target) (dial.Conn, error) {
		near, far := tcpPair(b)
		ends <- far
		return dial.NewTCP(near), nil
	}, setup{})
	b.SetBytes(size)
	for b.Loop() {
		client, piped := bench.open()
		from, to := client, <-ends
		if down {
			from, to = to, from
		}
		go func() {
			_, _ = io.Copy(from, io.LimitReader(struct{ io.Reader }{endless{}}, size))
			_ = from.CloseWrite()
		}()
		if n, err := io.Copy(io.Discard, to); n != size || err != nil {
			b.Fatal(n, err)
		}
		_ = to.CloseWrite()
		<-piped
	}
}

// Opening, one request and response of 1 KiB, and closing.
func BenchmarkConnection(b *testing.B) {
	bench := newBench(b, echo(b), setup{})
	request := make([]byte, 1<<10)
	b.RunParallel(func(p *testing.PB) {
		for p.Next() {
			client, piped := bench.open()
			_, _ = client.Write(request)
			_ = client.CloseWrite()
			if n, err := io.Copy(io.Discard, client); n != int64(len(request)) || err != nil {
				b.Error(n, err)
			}
			<-piped
		}
	})
}

// Resident memory per idle connection, agent and server and their sockets'
// buffers in Go together, after each has carried 1 KiB and 128 KiB both ways.
func BenchmarkIdleMemory(b *testing.B) {
	const conns = 1000
	bench := newBench(b, echo(b), setup{})
	for b.Loop() {
		before, goroutines := resident(b), runtime.NumGoroutine()
		var m0 runtime.MemStats
		runtime.ReadMemStats(&m0)
		stacks, heap := m0.StackInuse, m0.HeapAlloc
		var open []io.Closer
		for range conns {
			c, err := bench.links.Dial(context.Background(), kas())
			if err != nil {
				b.Fatal(err)
			}
			client, local := tcpPair(b)
			_ = client.SetDeadline(time.Time{})
			go dial.Pipe(dial.NewTCP(local), c)
			for _, n := range []int{1 << 10, 128 << 10} {
				go func() { _, _ = client.Write(make([]byte, n)) }()
				if _, err := io.CopyN(io.Discard, client, int64(n)); err != nil {
					b.Fatal(err)
				}
			}
			open = append(open, client)
		}
		// 2 goroutines of each connection are not ours: the echo, and none else.
		b.ReportMetric(float64(runtime.NumGoroutine()-goroutines)/conns, "goroutines/conn")
		b.ReportMetric(float64(resident(b)-before)/conns/1024, "KiB/conn")
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		b.ReportMetric(float64(m.StackInuse-stacks)/conns/1024, "stackKiB/conn")
		b.ReportMetric(float64(m.HeapAlloc-heap)/conns/1024, "heapKiB/conn")
		for _, c := range open {
			_ = c.Close()
		}
		eventually(b, "no stream left", bench.idle)
	}
}

// resident is what the process holds after a collection.
func resident(b *testing.B) int {
	b.Helper()
	debug.FreeOSMemory()
	debug.FreeOSMemory()
	stat, err := os.ReadFile("/proc/self/statm")
	if err != nil {
		b.Fatal(err)
	}
	pages, err := strconv.Atoi(strings.Fields(string(stat))[1])
	if err != nil {
		b.Fatal(err)
	}
	return pages * os.Getpagesize()
}
