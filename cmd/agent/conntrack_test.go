package main

import (
	"errors"
	"io/fs"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/kasway/kasway/pkg/intercept"
)

// conntrackOf stands for a kernel that tracks count connections of at most limit.
func conntrackOf(count, limit string) func(string) ([]byte, error) {
	return func(path string) ([]byte, error) {
		switch {
		case count == "":
			return nil, fs.ErrNotExist
		case strings.HasSuffix(path, "_count"):
			return []byte(count + "\n"), nil
		case strings.HasSuffix(path, "_max"):
			return []byte(limit + "\n"), nil
		}
		return nil, errors.New("not expected: " + path)
	}
}

func TestCase_B49_ConntrackNearlyFull(t *testing.T) {
	for name, c := range map[string]struct {
		modes, count, limit, state, text string
	}{
		"room":           {"ebpf nft iptables", "89999", "100000", stateOK, "89999 of 100000"},
		"nearly full":    {"ebpf nft", "90000", "100000", stateWarning, "new connections are dropped"},
		"full":           {"nft", "262144", "262144", stateWarning, "mode ebpf does not depend on it"},
		"small":          {"iptables", "9", "10", stateWarning, "9 of 10"},
		"no limit":       {"nft", "9", "0", stateOK, "9 of 0"},
		"not a number":   {"tproxy", "many", "10", stateUnknown, "many"},
		"nothing is":     {"nft", "", "", "", ""},
		"ebpf":           {"ebpf", "100000", "100000", "", ""},
		"nobody diverts": {"listen", "100000", "100000", "", ""},
	} {
		t.Run(name, func(t *testing.T) {
			found := checkConntrack(strings.Fields(c.modes), conntrackOf(c.count, c.limit))
			if c.state == "" {
				if found != nil {
					t.Errorf("found %v", found)
				}
				return
			}
			if len(found) != 1 || found[0].State != c.state || !strings.Contains(found[0].Detail+found[0].Why, c.text) {
				t.Fatalf("found %v, want %s: %s", found, c.state, c.text)
			}
			if (found[0].Remedy != "") != (c.state == stateWarning) {
				t.Errorf("remedy %q", found[0].Remedy)
			}
		})
	}
	reg := prometheus.NewRegistry()
	intercept.NewConntrackMetrics(reg, conntrackOf("90000", "100000"))
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	got := map[string]float64{}
	for _, f := range families {
		got[f.GetName()] = f.GetMetric()[0].GetGauge().GetValue()
	}
	if got["kasway_agent_conntrack_entries"] != 90000 || got["kasway_agent_conntrack_limit"] != 100000 {
		t.Errorf("metrics %v", got)
	}
}
