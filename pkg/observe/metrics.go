package observe

import (
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
)

// NewRegistry makes the registry of one process ("agent" or "server"), with
// the runtime's, the process's and the build's metrics in it.
func NewRegistry(process string) *prometheus.Registry {
	reg := prometheus.NewRegistry()
	reg.MustRegister(
		collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}),
	)
	build := prometheus.NewGaugeVec(prometheus.GaugeOpts{
		Name: "kasway_" + process + "_build_info",
		Help: "What is running; always 1.",
	}, []string{"version", "commit", "go"})
	info := Build()
	build.WithLabelValues(info.Version, info.Commit, info.Go).Set(1)
	reg.MustRegister(build)
	return reg
}
