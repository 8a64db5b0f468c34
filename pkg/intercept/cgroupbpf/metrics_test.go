package cgroupbpf

import (
	"fmt"
	"slices"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/bpf"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// Counters are those of a target by its name: neither another order of targets
// nor another installation makes one fall or count for another.
func TestMetrics(t *testing.T) {
	netns.Require(t)
	reg := prometheus.NewRegistry()
	m := NewMetrics(reg)
	counts := func() (in *installed, add func(index, client int, v bpf.KaswayKwVerdict, n uint64)) {
		in, err := newInstalled(Root{}, "", 1)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = in.close() })
		return in, func(index, client int, v bpf.KaswayKwVerdict, n uint64) {
			key := uint32((index*2+client)*verdicts + int(v))
			var perCPU []uint64
			if err := in.objects.KwCounts.Lookup(key, &perCPU); err != nil {
				t.Fatal(err)
			}
			perCPU[len(perCPU)-1] += n
			if err := in.objects.KwCounts.Put(key, perCPU); err != nil {
				t.Fatal(err)
			}
		}
	}
	named := func(names ...string) (s rules.State) {
		for _, n := range names {
			s.Diverts = append(s.Diverts, rules.Divert{Name: n})
		}
		return s
	}
	first, add := counts()
	m.read(first.objects.KwCounts)
	m.name(named("a", "b"))
	add(0, 0, bpf.KaswayKwVerdictKW_DIVERTED, 3)
	add(1, 1, bpf.KaswayKwVerdictKW_REFUSED, 5)
	m.name(named("b", "a")) // the other way round
	add(0, 1, bpf.KaswayKwVerdictKW_REFUSED, 2)
	m.read(nil)
	second, add := counts()
	m.read(second.objects.KwCounts)
	m.name(named("a"))
	add(0, 0, bpf.KaswayKwVerdictKW_DIVERTED, 1)
	want := []string{"a/host/diverted 4", "b/pods/refused 7"}
	if got := nonZero(t, reg); !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// nonZero are the series that have counted something.
func nonZero(t *testing.T, reg *prometheus.Registry) (out []string) {
	t.Helper()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			of := map[string]string{}
			for _, l := range m.GetLabel() {
				of[l.GetName()] = l.GetValue()
			}
			if n := m.GetCounter().GetValue(); n != 0 {
				out = append(out, fmt.Sprintf("%s/%s/%s %v", of["target"], of["client"], of["verdict"], n))
			}
		}
	}
	slices.Sort(out)
	return out
}
