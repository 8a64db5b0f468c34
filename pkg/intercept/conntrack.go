package intercept

import (
	"errors"
	"fmt"
	"io/fs"
	"strconv"
	"strings"

	"github.com/prometheus/client_golang/prometheus"
)

// Where the kernel says how many connections it tracks, of the reading thread's
// network namespace, and how many it may track, of each namespace.
const (
	conntrackCount = "/proc/sys/net/netfilter/nf_conntrack_count"
	conntrackMax   = "/proc/sys/net/netfilter/nf_conntrack_max"
)

// Conntrack is how full the kernel's table of tracked connections is. Once it is
// full, new connections are dropped that anybody's rules would translate, and
// with them what the modes nft, iptables and tproxy divert; mode ebpf has
// diverted before the kernel tracks anything.
type Conntrack struct{ Count, Max int }

// NearlyFull says whether nine tenths are used.
func (c Conntrack) NearlyFull() bool { return c.Max > 0 && c.Count >= c.Max-c.Max/10 }

// ReadConntrack asks the kernel; read is os.ReadFile. there is false where
// nothing is tracked.
func ReadConntrack(read func(path string) ([]byte, error)) (c Conntrack, there bool, err error) {
	for path, to := range map[string]*int{conntrackCount: &c.Count, conntrackMax: &c.Max} {
		b, err := read(path)
		if errors.Is(err, fs.ErrNotExist) {
			return Conntrack{}, false, nil
		}
		if err == nil {
			*to, err = strconv.Atoi(strings.TrimSpace(string(b)))
		}
		if err != nil {
			return Conntrack{}, false, fmt.Errorf("reading how many connections the kernel tracks: %s: %w", path, err)
		}
	}
	return c, true, nil
}

// NewConntrackMetrics registers at reg what ReadConntrack tells at each scrape;
// 0 stands for what is not known.
func NewConntrackMetrics(reg prometheus.Registerer, read func(path string) ([]byte, error)) {
	gauge := func(name, help string, of func(Conntrack) int) {
		reg.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "kasway_agent_conntrack_" + name, Help: help}, func() float64 {
			c, _, _ := ReadConntrack(read) // 0 if it fails
			return float64(of(c))
		}))
	}
	gauge("entries", "Connections that the kernel tracks in this network namespace.", func(c Conntrack) int { return c.Count })
	gauge("limit", "How many connections the kernel may track; beyond it new ones are dropped, those too that would be diverted by another mode than ebpf.", func(c Conntrack) int { return c.Max })
}
