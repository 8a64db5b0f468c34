package intercepttest

import (
	"errors"
	"os"
	"syscall"
	"testing"

	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

func TestMain(m *testing.M) {
	all := []Factory{referenceFactory("")}
	for _, fault := range faults {
		all = append(all, referenceFactory(fault))
	}
	Main(m, all...)
}

func TestReferencePasses(t *testing.T) {
	f := referenceFactory("")
	t.Run("Matrix", func(t *testing.T) {
		t.Setenv("KASWAY_MATRIX_OUT", "") // it is no mode of ours
		Run(t, f)
	})
	t.Run("Bridge", func(t *testing.T) { RunBridge(t, f) })
	t.Run("States", func(t *testing.T) { RunStates(t, f) })
	t.Run("Existing", func(t *testing.T) { RunExisting(t, f) })
	t.Run("OwnMark", func(t *testing.T) { RunOwnMark(t, f) })
	t.Run("Cleanup", func(t *testing.T) { RunCleanup(t, f) })
	t.Run("Death", func(t *testing.T) { RunDeath(t, f) })
}

// Every fault of the reference mode must be noticed by the part of the suite
// that is there to notice it.
func TestSuiteNoticesFaults(t *testing.T) {
	netns.Require(t)
	matrix := func(t *testing.T, w *world, f Factory) error {
		return errors.Join(w.matrix(t, f, &Table{})...)
	}
	death := func(when rules.WhenDown, s syscall.Signal) func(*testing.T, *world, Factory) error {
		return func(t *testing.T, w *world, f Factory) error {
			_, err := w.death(t, f, when, s)
			return err
		}
	}
	for _, c := range []struct {
		fault, part string
		run         func(*testing.T, *world, Factory) error
	}{
		{swapsTargets, "matrix", matrix},
		{forgetsV6Pods, "matrix", matrix},
		{portsAlone, "matrix", matrix},
		{leavesTable, "matrix", matrix},
		{takesMidway, "existing", func(t *testing.T, w *world, f Factory) error { return w.existing(start(t, w, f), f) }},
		{stopsFlows, "existing", func(t *testing.T, w *world, f Factory) error { return w.existing(start(t, w, f), f) }},
		{ignoresMark, "mark", func(t *testing.T, w *world, f Factory) error { return w.ownMark(start(t, w, f), f) }},
		{gap, "states", func(t *testing.T, w *world, f Factory) error { return w.replace(start(t, w, f), f) }},
		{gap, "refused", func(t *testing.T, w *world, f Factory) error { return w.refuseAndOpen(start(t, w, f), f) }},
		{leavesTable, "cleanup", func(t *testing.T, w *world, f Factory) error { return w.cleanup(t, f, rules.Direct, true) }},
		{noGuard, "cleanup", func(t *testing.T, w *world, f Factory) error { return w.cleanup(t, f, rules.Refuse, false) }},
		{noGuard, "death", death(rules.Refuse, syscall.SIGKILL)},
		{unreachable, "death", death(rules.Refuse, syscall.SIGSTOP)},
		{noExpiry, "death", death(rules.Direct, syscall.SIGKILL)},
		{noExpiry, "death frozen", death(rules.Refuse, syscall.SIGSTOP)},
	} {
		t.Run(c.fault+"/"+c.part, func(t *testing.T) {
			t.Parallel()
			w := build(t, netns.NoKubeProxy, true)
			err := c.run(t, w, referenceFactory(c.fault))
			if err == nil {
				t.Errorf("the fault is not noticed")
			}
			t.Logf("noticed: %v", err)
		})
	}
}

func TestTable(t *testing.T) {
	table := &Table{Mode: "x"}
	table.set("row", netns.NoKubeProxy, nil)
	table.set("row", netns.IptablesNFT, errors.New("no"))
	table.set("row", netns.IptablesNFT, nil) // a later pass does not hide a failure
	want, err := os.ReadFile("testdata/table.txt")
	if err != nil {
		t.Fatal(err)
	}
	if got := table.String(); got != string(want) {
		t.Errorf("got:\n%s\nwant:\n%s", got, want)
	}
}
