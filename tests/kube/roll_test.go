//go:build kube

package kube

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

// rolls is how often the DaemonSet is restarted under load.
const rolls = 2

// leastLoad is how many requests there are at least during one roll: fewer would
// prove little.
const leastLoad = 40

// TestDaemonSet: the agent as a DaemonSet serves two nodes, and replacing its
// pods fails no request of any pod and makes no informer list again.
func TestDaemonSet(t *testing.T) {
	for _, c := range daemonSets() {
		t.Run(c.Name(), func(t *testing.T) {
			b := up(t, c)
			must(t, "starting the server", b.StartServer(t.Context()))
			before := startNode(t, b, 200)
			everyCheckPasses(t, b)
			must(t, "starting the load", b.StartLoad(t.Context()))
			startInformers(t, b)
			must(t, "the load", check{do: loadRuns}.run(t.Context(), b, time.Minute))
			for range rolls {
				t.Run("roll", func(t *testing.T) { roll(t, b) })
			}
			t.Run("deleted", func(t *testing.T) { loadFails(t, b) })
			nothingWentAnotherWay(t, before)
		})
	}
}

func loadRuns(ctx context.Context, b *bed.Bed) error {
	return running(ctx, b, map[string]int{"podload": len(b.Nodes), "hostload": len(b.Nodes)})
}

// roll replaces the agent on every node, and looks at what everybody met.
func roll(t *testing.T, b *bed.Bed) {
	old, err := agentUIDs(t.Context(), b)
	must(t, "the pods of the agent", err)
	first, err := loadSoFar(b)
	must(t, "reading what the load got", err)
	began := time.Now()
	must(t, "rolling the DaemonSet", b.RollAgent(t.Context()))
	took := time.Since(began)
	// What began on the old agents has ended too when they have.
	must(t, "the end of the former pods", bed.Poll(t.Context(), 2*time.Minute, func() error {
		now, err := agentUIDs(t.Context(), b)
		for uid := range old {
			if err == nil && now[uid] {
				err = fmt.Errorf("pod %s is still there", uid)
			}
		}
		return err
	}))
	t.Logf("rolled over %d nodes in %.1f s, former pods gone after %.1f s", len(b.Nodes), took.Seconds(), time.Since(began).Seconds())
	time.Sleep(settle) // what was under way is told
	noneFailed(t, b, first, began)
	relists(t, b, "former-agents", began)
}

// noneFailed: no request of a pod under load failed since first was read, which
// was when something began.
func noneFailed(t *testing.T, b *bed.Bed, first map[string]loaded, began time.Time) {
	t.Helper()
	last, err := loadSoFar(b)
	must(t, "reading what the load got", err)
	for pod, l := range last {
		f := first[pod]
		t.Logf("%s: %d requests succeeded, %d failed, the slowest took %v", pod, l.ok-f.ok, l.failed-f.failed, l.slowestSince(began))
		if l.failed != f.failed {
			t.Errorf("requests of %s failed: %q", pod, l.failures[len(f.failures):])
		}
		if l.ok-f.ok < leastLoad {
			t.Errorf("%s made only %d requests", pod, l.ok-f.ok)
		}
	}
}

// loadFails: without an agent the load fails, and is refused, as whenDown says.
func loadFails(t *testing.T, b *bed.Bed) {
	first, err := loadSoFar(b)
	must(t, "reading what the load got", err)
	must(t, "deleting the DaemonSet", b.DeleteAgent(t.Context()))
	must(t, "requests that fail", bed.Poll(t.Context(), 30*time.Second, func() error {
		last, err := loadSoFar(b)
		if err != nil {
			return err
		}
		for pod, l := range last {
			new := l.failures[len(first[pod].failures):]
			if !slices.ContainsFunc(new, func(f string) bool { return strings.Contains(f, "connection refused") }) {
				return fmt.Errorf("nothing of %s is refused, of %d requests that failed: %q", pod, len(new), new)
			}
		}
		return nil
	}))
}

// agentUIDs are those of all pods of the agent.
func agentUIDs(ctx context.Context, b *bed.Bed) (map[string]bool, error) {
	all, err := pods(ctx, b)
	uids := map[string]bool{}
	for _, p := range all {
		if strings.HasPrefix(p.Metadata.Name, bed.Agent) {
			uids[p.Metadata.UID] = true
		}
	}
	return uids, err
}

// loaded is what one pod under load has said since it began.
type loaded struct {
	ok, failed int
	failures   []string
	slowest    map[time.Time]time.Duration // of each second
}

func (l loaded) slowestSince(after time.Time) (most time.Duration) {
	for at, took := range l.slowest {
		if at.After(after) {
			most = max(most, took)
		}
	}
	return most
}

// loadSoFar reads the logs of all pods under load.
func loadSoFar(b *bed.Bed) (map[string]loaded, error) {
	all := map[string]loaded{}
	for _, n := range b.Nodes {
		for _, kind := range []string{"podload", "hostload"} {
			l := loaded{slowest: map[time.Time]time.Duration{}}
			err := podLog(n, "default_"+kind, time.Time{}, func(at time.Time, text string) {
				_, said, found := strings.Cut(text, " LOAD ")
				if !found {
					l.failures = append(l.failures, text)
					return
				}
				var slowest int64
				if _, err := fmt.Sscanf(said, "ok %d failed %d slowest %d ms", &l.ok, &l.failed, &slowest); err == nil {
					l.slowest[at] = time.Duration(slowest) * time.Millisecond
				}
			})
			if err != nil {
				return nil, err
			}
			all[kind+" of "+n.Name] = l
		}
	}
	return all, nil
}
