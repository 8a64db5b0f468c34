package main

import (
	"net/http"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"text/tabwriter"
	"time"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
)

func TestConnsTable(t *testing.T) {
	now := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	root, nobody := uint32(0), uint32(65534)
	at := netip.MustParseAddrPort
	all := []agent.ConnStatus{
		{Target: "kas", State: intercept.ConnOpen, Since: now.Add(-90 * time.Second), Client: at("10.244.1.9:40001"), Pod: true},
		{Target: "kas", State: intercept.ConnOpen, Since: now.Add(-time.Minute), Client: at("[fd00:10::1]:40002"), Original: at("[fd00:96::1]:443"),
			Workload: "kube-proxy.service", UID: &root, PID: 4300, Command: "kube-proxy", Sent: 1536, Received: 20 << 20},
		{Target: "kas", State: intercept.ConnOpen, Since: now.Add(-2 * time.Hour), Client: at("10.0.0.1:40003"), Original: at("10.96.0.1:443"),
			Workload: "kubelet.service", UID: &root, PID: 4242, Command: "kubelet",
			CommandLine: "/usr/bin/kubelet --config=/var/lib/kubelet/config.yaml --v=2", Sent: 1023, Received: 1024, Quiet: 2600 * time.Millisecond},
		{Target: "kas", State: intercept.ConnOpen, Draining: true, Since: now.Add(-62 * time.Minute), Client: at("10.0.0.1:40004"), Original: at("10.96.0.1:443"),
			Workload: "kubelet.service", UID: &root, PID: 4242, Command: "kubelet"},
		{Target: "kas", State: intercept.ConnHeld, Since: now.Add(-time.Second), Client: at("10.0.0.1:40005")},
		{Target: "10.9.0.1:6443", State: intercept.ConnDialling, Since: now, Client: at("10.244.1.7:40006"), Pod: true, Original: at("10.9.0.1:6443"),
			Workload: "pod 0c7b9a52-6f3e-4d55-9a53-3a3e1b6a8c11/4f1e5a0c9d2b", PodUID: "0c7b9a52-6f3e-4d55-9a53-3a3e1b6a8c11", UID: &nobody, PID: 99, Command: "curl"},
	}
	sortConns(all)
	golden(t, "conns", table(t, all, now))
	if got := table(t, nil, now); got != "no connection is carried now\n" {
		t.Errorf("nothing is shown as %q", got)
	}
}

func table(t *testing.T, all []agent.ConnStatus, now time.Time) string {
	t.Helper()
	var b strings.Builder
	w := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	printConns(w, all, now)
	if err := w.Flush(); err != nil {
		t.Fatal(err)
	}
	return b.String()
}

// A process is called what it likes, and a cgroup too: the table stays one.
func TestCase_B96_AnyNameIsShownEscaped(t *testing.T) {
	now := time.Now()
	for name, s := range map[string]agent.ConnStatus{
		"command":      {PID: 1, Command: "é\n\x01"},
		"command line": {PID: 1, Command: "x", CommandLine: strings.Repeat("\x1b[2J\t", 800)},
		"workload":     {Workload: "cgroup /" + strings.Repeat("é\n\t", 100)},
		"not UTF-8":    {Workload: "\xff\x9b", PID: 1, Command: "\xff"},
	} {
		s.Target = "kas"
		got := table(t, []agent.ConnStatus{s}, now)
		if lines := strings.Count(got, "\n"); lines != 2 || strings.ContainsFunc(got, func(r rune) bool { return r < ' ' && r != '\n' || r == 0x7f || r == '\uFFFD' }) {
			t.Errorf("%s: %d lines: %q", name, lines, got)
		}
		for line := range strings.Lines(got) {
			if n := len([]rune(line)); n > 250 {
				t.Errorf("%s: a line of %d characters", name, n)
			}
		}
	}
}

func TestNarrowAndSize(t *testing.T) {
	for in, want := range map[string]string{"": "", "abcdefg": "abcdefg", "abcdefgh": "abc…fgh", "éééééééé": "ééé…ééé"} {
		if got := narrow(in, 7); got != want {
			t.Errorf("%q becomes %q, want %q", in, got, want)
		}
	}
	for in, want := range map[uint64]string{
		0: "0", 1023: "1023", 1024: "1.0K", 1536: "1.5K", 10<<10 - 1: "10K", 1<<20 - 1: "1.0M", 20 << 20: "20M", 3 << 30: "3.0G", 1<<64 - 1: "16E",
	} {
		if got := size(in); got != want {
			t.Errorf("%d becomes %s, want %s", in, got, want)
		}
	}
}

// During an upgrade two agents answer, each with its own.
func TestConnsOfEveryGeneration(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	for _, generation := range []string{"old", "new", "odd"} {
		l, _, err := observe.TakeOver(path, generation)
		if err != nil {
			t.Fatal(err)
		}
		pages := observe.Pages{"/conns": func() any { return []agent.ConnStatus{{ID: generation}} }}
		if generation == "odd" {
			pages = observe.Pages{} // of a version without the question
		}
		s := &http.Server{Handler: observe.AdminHandler(func() error { return nil }, pages)}
		done := make(chan error, 1)
		go func() { done <- s.Serve(l) }()
		t.Cleanup(func() { _, _ = s.Close(), <-done })
	}
	all, err := everyConn(t.Context(), path)
	if err != nil || len(all) != 2 || all[0].ID+all[1].ID != "newold" {
		t.Errorf("%+v, %v", all, err)
	}
}
