package main

import (
	"os"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"

	"github.com/kasway/kasway/pkg/workload"
)

func TestWorkloads(t *testing.T) {
	if _, err := workload.NewIndex("/sys/fs/cgroup"); err != nil {
		if _, err := workload.NewIndex("/sys/fs/cgroup/unified"); err != nil {
			t.Skip("no cgroup 2 in sight")
		}
	}
	log, hook := logtest.NewNullLogger()
	if workloads("auto", log) == nil || len(hook.Entries) != 0 {
		t.Errorf("nothing found where cgroup 2 is; logged %v", hook.Entries)
	}
	for _, path := range []string{t.TempDir(), "/nowhere", os.DevNull} {
		hook.Reset()
		if workloads(path, log) != nil || len(hook.Entries) != 1 || hook.LastEntry().Level != logrus.WarnLevel {
			t.Errorf("%s is taken for a cgroup, or nothing is said: %v", path, hook.Entries)
		}
	}
}
