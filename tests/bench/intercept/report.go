package main

import (
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"text/tabwriter"
	"time"

	"golang.org/x/sys/unix"
)

// The goals, of docs/requirements.md.
const (
	goalD7 = 500.0 // ns that mode ebpf may add to a connect that it does not divert
	goalD8 = 1.2   // times a connect and echo without it that a diverted one may take
)

// fewest is how many rounds a verdict takes.
const fewest = 5

// figure is one measure of one mode.
type figure struct {
	Mode, Client, Measure string
	// Off and On are medians: nanoseconds, or bytes per second of throughput.
	Off, On float64
	// Ratio is the median of the rounds' ratios, Delta that of their
	// differences; the noises are the distances of the middle half.
	Ratio, RatioNoise float64
	Delta, DeltaNoise float64
}

// report is all of a run.
type report struct {
	When          time.Time
	Kernel        string
	Cores, Rounds int
	LoadBefore    string
	LoadAfter     string
	Figures       []figure
}

func newReport(o options) *report {
	var u unix.Utsname
	_ = unix.Uname(&u) // cannot fail with a valid pointer
	return &report{
		When: time.Now().UTC(), Kernel: unix.ByteSliceToString(u.Release[:]), Cores: runtime.NumCPU(),
		Rounds: o.rounds, LoadBefore: load(),
	}
}

// load is the machine's load of the last minute.
func load() string {
	b, err := os.ReadFile("/proc/loadavg")
	if err != nil {
		return "unknown"
	}
	return strings.Fields(string(b))[0]
}

func (r *report) add(mode string, results map[string]*pairs) {
	for _, client := range []string{"host", "pod"} {
		for _, name := range measureNames {
			p := results[client+" "+name]
			f := figure{Mode: mode, Client: client, Measure: name, Off: median(p.Off), On: median(p.On)}
			f.Ratio, f.RatioNoise = p.ratio()
			f.Delta, f.DeltaNoise = p.delta()
			r.Figures = append(r.Figures, f)
		}
	}
}

func (r *report) print(w io.Writer) {
	_, _ = fmt.Fprintf(w, "Linux %s, %d cores, load %s before and %s after, %d rounds; medians, ± the middle half\n\n",
		r.Kernel, r.Cores, r.LoadBefore, r.LoadAfter, r.Rounds)
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "MODE\tCLIENT\tMEASURE\tWITHOUT\tWITH\tRATIO\tDIFFERENCE")
	for _, f := range r.Figures {
		_, _ = fmt.Fprintf(t, "%s\t%s\t%s\t%s\t%s\t%.2f ± %.2f\t%s\n", f.Mode, f.Client, f.Measure,
			f.text(f.Off), f.text(f.On), f.Ratio, f.RatioNoise, f.difference())
	}
	_ = t.Flush() // as the writes above: nobody could be told
	if r.Rounds < fewest {
		_, _ = fmt.Fprintf(w, "\nThe goals are not judged by fewer than %d rounds.\n", fewest)
		return
	}
	for _, g := range r.goals() {
		_, _ = fmt.Fprintln(w, g.String())
	}
}

func (f figure) text(v float64) string {
	if f.Measure == "throughput" {
		return fmt.Sprintf("%.1f Gbit/s", v*8/1e9)
	}
	return fmt.Sprintf("%.2f µs", v/1e3)
}

func (f figure) difference() string {
	if f.Measure == "throughput" {
		return "-"
	}
	return fmt.Sprintf("%+.2f ± %.2f µs", f.Delta/1e3, f.DeltaNoise/1e3)
}

// goal is one of the numbers to reach, and what was reached.
type goal struct {
	text string
	met  bool
}

func (g goal) String() string {
	if g.met {
		return g.text + " ok"
	}
	return g.text + " missed"
}

// goals are about mode ebpf, on the node and in pods.
func (r *report) goals() (all []goal) {
	for _, f := range r.Figures {
		if f.Mode != "ebpf" {
			continue
		}
		switch f.Measure {
		case "unmatched connect":
			all = append(all, goal{fmt.Sprintf("D7 unmatched connect, %s: %+.2f µs (goal + 0.5 µs)", f.Client, f.Delta/1e3), f.Delta <= goalD7})
		case "connect + echo":
			all = append(all, goal{fmt.Sprintf("D8 matched connect + echo, %s: %.2f x (goal 1.2 x)", f.Client, f.Ratio), f.Ratio <= goalD8})
		}
	}
	return all
}

func (r *report) verdict() error {
	if r.Rounds < fewest {
		return nil
	}
	var missed []string
	for _, g := range r.goals() {
		if !g.met {
			missed = append(missed, g.text)
		}
	}
	if len(missed) > 0 {
		return fmt.Errorf("missed: %s", strings.Join(missed, "; "))
	}
	return nil
}

// write keeps the figures as JSON.
func (r *report) write(path string) error {
	b, err := json.MarshalIndent(r, "", "  ")
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		return err
	}
	return os.WriteFile(path, append(b, '\n'), 0o644)
}
