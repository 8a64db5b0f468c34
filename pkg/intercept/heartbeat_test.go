package intercept

import (
	"errors"
	"os"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/tests/netns"
)

func TestHeartbeatBeatsAtOnceAndByInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, _ := logs(t)
		var beats atomic.Int64
		stop := StartHeartbeat(HeartbeatInterval, func() error { beats.Add(1); return nil }, log, nil)
		synctest.Wait()
		if beats.Load() != 1 {
			t.Errorf("%d beats at the start, want 1", beats.Load())
		}
		time.Sleep(10*HeartbeatInterval + time.Millisecond)
		stop()
		stop()
		if beats.Load() != 11 {
			t.Errorf("%d beats in 5 s, want 11", beats.Load())
		}
		time.Sleep(time.Minute)
		if beats.Load() != 11 {
			t.Error("it beats after stop")
		}
	})
}

func TestHeartbeatStopWaitsForTheBeat(t *testing.T) {
	log, _ := logs(t)
	began, goOn := make(chan struct{}), make(chan struct{})
	var ended atomic.Bool
	stop := StartHeartbeat(time.Hour, func() error { close(began); <-goOn; ended.Store(true); return nil }, log, nil)
	<-began
	go func() { close(goOn) }()
	if stop(); !ended.Load() {
		t.Error("stop returned during a beat")
	}
}

func TestHeartbeatLogsChangesAndCountsFailures(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, hook := logs(t)
		m, v := metrics(t)
		var fail atomic.Bool
		fail.Store(true)
		stop := StartHeartbeat(time.Second, func() error {
			if fail.Load() {
				return errors.New("no set")
			}
			return nil
		}, log, m)
		time.Sleep(3500 * time.Millisecond)
		fail.Store(false)
		time.Sleep(3 * time.Second)
		stop()
		if got := v.of("heartbeat_failed_total"); got != 4 {
			t.Errorf("%v failures counted, want 4", got)
		}
		e := hook.AllEntries()
		if len(e) != 2 || e[0].Level != logrus.ErrorLevel || e[1].Level != logrus.InfoLevel {
			t.Errorf("logged %v, want one error and one recovery", e)
		}
	})
}

func TestHeartbeatCountsMissedBeats(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		log, hook := logs(t)
		m, v := metrics(t)
		stall := true
		stop := StartHeartbeat(HeartbeatInterval, func() error {
			if stall {
				stall = false
				time.Sleep(HeartbeatTimeout + 100*time.Millisecond)
			}
			return nil
		}, log, m)
		time.Sleep(2 * HeartbeatTimeout)
		stop()
		if got := v.of("heartbeat_missed_total"); got != 4 {
			t.Errorf("%v missed, want the 4 that a stall of 2.6 s leaves out", got)
		}
		if len(hook.AllEntries()) != 1 {
			t.Errorf("logged %v, want one line about the stall", hook.AllEntries())
		}
	})
}

func TestHeartbeatWorksInTheCallersNamespace(t *testing.T) {
	netns.Require(t)
	lab, err := netns.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer shut(lab)
	h, err := lab.Host("node")
	if err != nil {
		t.Fatal(err)
	}
	log, _ := logs(t)
	here := func() string {
		name, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Error(err)
		}
		return name
	}
	var want string
	got := make(chan string, 1)
	var stop func()
	err = h.Do(func() error {
		want = here()
		stop = StartHeartbeat(time.Hour, func() error { got <- here(); return nil }, log, nil)
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	defer stop()
	if got := <-got; got != want || got == here() {
		t.Errorf("beats in %s, want %s (outside it is %s)", got, want, here())
	}
}
