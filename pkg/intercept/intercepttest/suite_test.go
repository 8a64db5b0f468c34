package intercepttest

import (
	"errors"
	"os"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

func TestMain(m *testing.M) {
	all := []Factory{referenceFactory(""), listenFactory(), nftFactory, tproxyNFT, tproxyIPTables, ebpfFactory}
	for _, fault := range faults {
		all = append(all, referenceFactory(fault))
	}
	for name := range pickyReports {
		all = append(all, pickyFactory(name))
	}
	Main(m, all...)
}

// The reference passes every part of the suite; FULL=1 runs the parts as the
// modes' own tests do, with every kube-proxy.
func TestReferencePasses(t *testing.T) {
	netns.Require(t)
	f := referenceFactory("")
	if os.Getenv("FULL") == "1" {
		t.Setenv("KASWAY_MATRIX_OUT", "") // it is no mode of ours
		for name, run := range map[string]func(*testing.T, Factory){"Run": Run, "Bridge": RunBridge, "States": RunStates,
			"Existing": RunExisting, "OwnMark": RunOwnMark, "Cleanup": RunCleanup, "Death": RunDeath} {
			t.Run(name, func(t *testing.T) { run(t, f) })
		}
		return
	}
	for name, run := range parts {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if err := run(t, build(t, f.node(netns.IptablesNFT)), f); err != nil {
				t.Error(err)
			}
		})
	}
}

// parts are the parts of the suite in one world.
var parts = map[string]func(*testing.T, *world, Factory) error{
	"matrix":   func(t *testing.T, w *world, f Factory) error { return errors.Join(w.matrix(t, f, &Table{})...) },
	"refused":  func(t *testing.T, w *world, f Factory) error { return w.refuseAndOpen(start(t, w, f), f) },
	"replaced": func(t *testing.T, w *world, f Factory) error { return w.replace(start(t, w, f), f) },
	"existing": func(t *testing.T, w *world, f Factory) error { return w.existing(start(t, w, f), f) },
	"own mark": func(t *testing.T, w *world, f Factory) error { return w.ownMark(start(t, w, f), f) },
	"closed":   func(t *testing.T, w *world, f Factory) error { return w.cleanup(t, f, rules.Refuse, false) },
	"cleaned":  func(t *testing.T, w *world, f Factory) error { return w.cleanup(t, f, rules.Direct, true) },
	"killed, refuse": func(t *testing.T, w *world, f Factory) error {
		_, err := w.death(t, f, rules.Refuse, syscall.SIGKILL)
		return err
	},
	"killed, direct": func(t *testing.T, w *world, f Factory) error {
		_, err := w.death(t, f, rules.Direct, syscall.SIGKILL)
		return err
	},
	"frozen, refuse": func(t *testing.T, w *world, f Factory) error {
		_, err := w.death(t, f, rules.Refuse, syscall.SIGSTOP)
		return err
	},
}

// Every fault of the reference mode must be noticed, and for the right reason,
// by the part of the suite that is there to notice it.
func TestSuiteNoticesFaults(t *testing.T) {
	netns.Require(t)
	for _, c := range []struct{ fault, part, saying string }{
		{swapsTargets, "matrix", "reached other, want the listener of kas"},
		{forgetsV6Pods, "matrix", "reached KAS, want the listener of kas"},
		{portsAlone, "matrix", "bystander: host"},
		{leavesTable, "matrix", "after cleanup"},
		{takesMidway, "existing", "made before Apply"},
		{stopsFlows, "existing", "after Close"},
		{ignoresMark, "own mark", "marked socket, targets refused=false"},
		{gap, "replaced", "while targets are replaced"},
		{gap, "refused", "being "},
		{leavesTable, "cleaned", "left behind: nft"},
		{noGuard, "closed", "connected, want ECONNREFUSED"},
		{unreachable, "closed", "want ECONNREFUSED: dial"},
		{noGuard, "killed, refuse", "escaped to the KAS"},
		{noExpiry, "killed, direct", "more than 3 s after the blow"},
	} {
		t.Run(c.fault+"/"+c.part, func(t *testing.T) {
			t.Parallel()
			err := parts[c.part](t, build(t, fullNode(netns.NoKubeProxy)), referenceFactory(c.fault))
			if err == nil || !strings.Contains(err.Error(), c.saying) {
				t.Errorf("want an error saying %q, got: %v", c.saying, err)
			}
		})
	}
}

// Each rule of judge, with a course of events that breaks it alone.
func TestJudge(t *testing.T) {
	t0 := time.Now().Add(-time.Minute)
	at := func(s float64) time.Time { return t0.Add(time.Duration(s * float64(time.Second))) }
	d := course{workers: 1, struck: at(10), settled: at(13), revived: at(20), restored: at(23)}
	rec := func(begun float64, o outcome) record {
		return record{begun: at(begun), finished: at(begun + 0.1), outcome: o}
	}
	good := []record{rec(5, toTarget), rec(10.5, brokenOff), rec(11, refused), rec(15, refused), rec(25, toTarget)}
	slow := rec(15, refused)
	slow.connect = maxConnect + time.Millisecond
	for name, c := range map[string]struct {
		when rules.WhenDown
		bad  record
	}{
		"refused before the blow": {rules.Refuse, rec(5, refused)},
		"escape before 3 s":       {rules.Refuse, rec(11, toKAS)},
		"not refused after 3 s":   {rules.Refuse, rec(15, toTarget)},
		"refused after recovery":  {rules.Refuse, rec(25, refused)},
		"mixed up":                {rules.Refuse, rec(21, mixedUp)},
		"another errno":           {rules.Refuse, rec(11, failed)},
		"too many in flight":      {rules.Refuse, rec(11, brokenOff)},
		"slow connect":            {rules.Refuse, slow},
		"refused, not direct":     {rules.Direct, rec(15, refused)},
	} {
		if v := d.judge(append(slices.Clone(good), c.bad), c.when); len(v.errs) == 0 {
			t.Errorf("%s: not noticed", name)
		}
	}
	killed := d
	killed.gone = at(10.2)
	if v := killed.judge(good, rules.Refuse); len(v.errs) == 0 {
		t.Error("a connection that a dead process took: not noticed")
	}
	if v := d.judge(good, rules.Refuse); len(v.errs) > 0 {
		t.Errorf("a good course: %v", v.errs)
	}
}

func TestTable(t *testing.T) {
	table := &Table{Mode: "x"}
	table.set("row", netns.NoKubeProxy, "ok", nil)
	table.set("row", netns.IptablesNFT, "ok", errors.New("no"))
	table.set("row", netns.IptablesNFT, "ok", nil) // a later pass does not hide a failure
	want, err := os.ReadFile("testdata/table.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got := table.String(); got != string(want) {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
