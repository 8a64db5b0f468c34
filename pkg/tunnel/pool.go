package tunnel

import "sync"

// buffers is the pool of all links. gRPC's own zeroes every buffer it hands
// out, which was 8 % of the CPU time, and serves 64 KiB with 1 MiB.
var buffers = newBufferPool(2<<10, 4<<10, 16<<10, 64<<10, 128<<10)

// bufferPool is a mem.BufferPool of size classes. Buffers are not cleared: a
// holder sees only the bytes that it wrote itself, since gRPC and Conn cut
// every buffer to what they filled.
type bufferPool struct {
	sizes []int // ascending
	pools []sync.Pool
}

func newBufferPool(sizes ...int) *bufferPool {
	return &bufferPool{sizes: sizes, pools: make([]sync.Pool, len(sizes))}
}

// Get returns a buffer of the given length with undefined content.
func (p *bufferPool) Get(length int) *[]byte {
	for i, size := range p.sizes {
		if length > size {
			continue
		}
		if b, ok := p.pools[i].Get().(*[]byte); ok {
			*b = (*b)[:length]
			return b
		}
		b := make([]byte, length, size)
		return &b
	}
	b := make([]byte, length)
	return &b
}

// Put takes a buffer back. Buffers of no class are left to the collector.
func (p *bufferPool) Put(b *[]byte) {
	for i, size := range p.sizes {
		if cap(*b) == size {
			p.pools[i].Put(b)
			return
		}
	}
}
