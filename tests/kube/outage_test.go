//go:build kube

package kube

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

// The informers of the outage: as many as a busy node has, on one client.
const informerCount = 50

// settle is how old a watch is at least when it is cut: one that ends within a
// second of its beginning is another case for client-go.
const settle = 3 * time.Second

// How long each outage lasts, and how long after it everything that may still
// come has come: client-go backs off for up to a minute. An outage ends amid a
// hold: a client's dial is held for 5 s and reset, and then the client itself waits
// for a second, so a multiple of 6 s would measure that wait or not, by chance.
const (
	outageLength = 32 * time.Second
	agentOutage  = 20 * time.Second
	afterOutage  = 70 * time.Second
)

// TestCase_B93_Outage: what clients meet while nothing can be carried makes no
// informer list again, and none back off once the way is open.
func TestCase_B93_Outage(t *testing.T) {
	for _, c := range outageBeds() {
		t.Run(c.Name(), func(t *testing.T) {
			b := up(t, c)
			must(t, "starting the server", b.StartServer(t.Context()))
			before := startNode(t, b, 200)
			must(t, "pods", check{do: podsRunning}.run(t.Context(), b, time.Minute))
			startInformers(t, b)
			for _, o := range outages() {
				t.Run("without "+o.name, func(t *testing.T) { o.run(t, b) })
			}
			t.Run("without agent", func(t *testing.T) { agentKilled(t, b) })
			t.Run("upgrade", func(t *testing.T) { upgrade(t, b) })
			nothingWentAnotherWay(t, before)
		})
	}
}

// outage is a way between the agent and the KAS that is cut: the agent lives and
// cannot carry.
type outage struct {
	name     string
	cut, end func(context.Context, *bed.Bed) error
}

func outages() []outage {
	all := []outage{{"server",
		func(_ context.Context, b *bed.Bed) error { return b.Kill(bed.Server) },
		func(ctx context.Context, b *bed.Bed) error { return b.StartServer(ctx) }}}
	if full() {
		all = append(all, outage{"upstream",
			func(ctx context.Context, b *bed.Bed) error { return b.RefuseUpstream(ctx) },
			func(ctx context.Context, b *bed.Bed) error { return b.AdmitUpstream(ctx) }})
	}
	return all
}

func (o outage) run(t *testing.T, b *bed.Bed) {
	began := time.Now()
	must(t, "cutting the way", o.cut(t.Context(), b))
	time.Sleep(outageLength)
	must(t, "opening it again", o.end(t.Context(), b))
	back := time.Now() // the server accepts, or the KAS does
	fresh, err := allFresh(t.Context(), b, began, afterOutage)
	must(t, "the informers after the outage", err)
	figure(t, "fresh-after-"+o.name+"-outage-s", fresh.Sub(back).Seconds(), 1)
	relists(t, b, o.name, began)
	errnos(t, b, o.name, began, back)
}

func agentKilled(t *testing.T, b *bed.Bed) {
	began := time.Now()
	must(t, "killing the agent", b.Kill(b.Nodes[0].Process(bed.Agent)))
	time.Sleep(agentOutage)
	// A connect of the very moment may still be taken by the dying process's
	// backlog, and is then reset.
	refused := errnos(t, b, "agent", began.Add(time.Second), time.Now())
	if refused["ECONNREFUSED"] == 0 {
		t.Errorf("nobody was refused: %v", refused)
	}
	for answer := range refused {
		if answer != "ECONNREFUSED" {
			t.Errorf("with no agent a connect ended with %q, which is not ECONNREFUSED", answer)
		}
	}
	back := time.Now()
	must(t, "starting the agent again", b.Nodes[0].StartAgent(t.Context()))
	must(t, "the agent", b.AgentAnswers(t.Context(), "/readyz", 200))
	// Those who were refused back off for as long again: there is no goal.
	fresh, err := allFresh(t.Context(), b, began, afterOutage)
	must(t, "the informers after the outage", err)
	t.Logf("all fresh %.1f s after the agent was started again", fresh.Sub(back).Seconds())
	relists(t, b, "agent", began)
}

// startInformers starts them on the first node, and returns when they watch.
func startInformers(t *testing.T, b *bed.Bed) {
	t.Helper()
	tick(t, b)
	must(t, "starting the informers", b.Nodes[0].Start("informers", binaries.Hyperkube,
		"informers", "--kubeconfig", b.Path("pki/informers.kubeconfig"), "--count", fmt.Sprint(informerCount)))
	_, err := allFresh(t.Context(), b, time.Time{}, time.Minute)
	must(t, "the informers at first", err)
	time.Sleep(settle)
}

// figure prints one measured value with the most that it may be.
func figure(t *testing.T, name string, value, most float64) {
	t.Helper()
	verdict := "ok"
	if value > most {
		verdict = "missed"
		t.Errorf("%s is %.3g, and may be %.3g at most", name, value, most)
	}
	fmt.Printf("B93 %s %.3g (goal <= %.3g) %s\n", name, value, most, verdict)
}

// How often the ConfigMap of the informers is written: often enough to see who is
// fresh, and at first as fast as it goes. The KAS begins with room for the last
// hundred changes of all ConfigMaps, and doubles it when that holds less than 75 s:
// 400 at once make it 800, which last for five minutes. A watch to which nothing
// happens, and which is cut several times in the meantime, can then still go on.
// (At ten times a second, what fifty watches have missed in an outage fills other
// buffers of the KAS, which then ends them.)
const (
	tickEvery  = 360 * time.Millisecond
	firstTicks = 410
	tickPath   = "/api/v1/namespaces/default/configmaps/tick"
)

// tick writes the ConfigMap of the informers until the test ends, beside the KAS,
// so that no outage holds it up.
func tick(t *testing.T, b *bed.Bed) {
	t.Helper()
	at := func() []byte {
		return fmt.Appendf(nil, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"tick"},"data":{"at":%q}}`, time.Now().Format(time.RFC3339Nano))
	}
	must(t, "creating the ConfigMap", b.API().Create(t.Context(), path.Dir(tickPath), at()))
	for range firstTicks {
		must(t, "writing the ConfigMap", b.API().Merge(t.Context(), tickPath, at()))
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() {
		every := time.NewTicker(tickEvery)
		defer every.Stop()
		for {
			select {
			case <-ctx.Done():
				ended <- nil
				return
			case <-every.C:
			}
			if err := b.API().Merge(ctx, tickPath, at()); err != nil && ctx.Err() == nil {
				ended <- err
				return
			}
		}
	}()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("the writer gave up: %v", err)
		}
	})
}

// said is one line of the informers.
type said struct {
	At       time.Time
	Event    string
	Informer int
	Error    string
}

// informersSaid is what the informers said after a moment.
func informersSaid(b *bed.Bed, after time.Time) ([]said, error) {
	text, err := os.ReadFile(b.Path("log", b.Nodes[0].Process("informers")+".log"))
	if err != nil {
		return nil, err
	}
	var lines []said
	for line := range bytes.Lines(text) {
		var s said
		// Not all lines are ours (client-go logs to the same file), and the
		// last may be half written.
		if json.Unmarshal(line, &s) == nil && s.At.After(after) {
			lines = append(lines, s)
		}
	}
	return lines, nil
}

// allFresh waits until every informer has become fresh after a moment, and
// returns when the last one did.
func allFresh(ctx context.Context, b *bed.Bed, after time.Time, limit time.Duration) (last time.Time, err error) {
	err = bed.Poll(ctx, limit, func() error {
		lines, err := informersSaid(b, after)
		if err != nil {
			return err
		}
		first := map[int]time.Time{}
		for _, s := range lines {
			if _, known := first[s.Informer]; s.Event == "fresh" && !known {
				first[s.Informer] = s.At
			}
		}
		if len(first) < informerCount {
			return fmt.Errorf("%d of %d informers are fresh; their log ends with:\n%s", len(first), informerCount, b.Tail(b.Nodes[0].Process("informers"), 5))
		}
		for _, at := range first {
			if at.After(last) {
				last = at
			}
		}
		return nil
	})
	return last, err
}

// errnos counts how the informers' connects ended during an outage, and fails
// on what makes an informer list again.
func errnos(t *testing.T, b *bed.Bed, what string, from, to time.Time) map[string]int {
	t.Helper()
	lines, err := informersSaid(b, from)
	must(t, "reading what the informers said", err)
	n := map[string]int{}
	for _, s := range lines {
		if s.Event == "dial" && s.At.Before(to) {
			n[s.Error]++
		}
	}
	t.Logf("connects without the %s ended like this (\"\" is accepted): %v", what, n)
	wrong := n["EPERM"] + n["EACCES"] + n["EHOSTUNREACH"] + n["ENETUNREACH"]
	for _, component := range []string{"kubelet", "kube-proxy"} {
		log := b.Tail(b.Nodes[0].Process(component), 1_000_000)
		for _, text := range []string{"operation not permitted", "permission denied", "no route to host", "network is unreachable"} {
			wrong += strings.Count(log, "connect: "+text)
		}
	}
	figure(t, "eperm-ehostunreach-without-"+what, float64(wrong), 0)
	return n
}

// watcher is a client that watches, and who it is in the audit log.
type watcher struct{ name, user string }

func watchers(b *bed.Bed) []watcher {
	return []watcher{{"informers", bed.UserInformers}, {"kubelet", b.Nodes[0].User()}, {"kube-proxy", "system:kube-proxy"}}
}

// asked is what one user has asked the KAS for.
type asked struct {
	watches int      // that go on from where they were
	lists   []string // those that begin with all objects: lists, and watches that do
}

// relists waits until everybody watches again, and then counts, from the KAS's
// audit log, who listed again since a moment.
func relists(t *testing.T, b *bed.Bed, what string, since time.Time) {
	t.Helper()
	must(t, "everybody's return", bed.Poll(t.Context(), afterOutage, func() error {
		all, err := auditSince(b, since)
		for _, w := range watchers(b) {
			if err == nil && all[w.user].watches == 0 {
				err = fmt.Errorf("%s has opened no watch since", w.name)
			}
		}
		return err
	}))
	time.Sleep(settle)
	all, err := auditSince(b, since)
	must(t, "reading the audit log", err)
	for _, w := range watchers(b) {
		t.Logf("%s: %d watches since, listed again: %v", w.name, all[w.user].watches, all[w.user].lists)
		figure(t, "relists-"+w.name+"-without-"+what, float64(len(all[w.user].lists)), 0)
	}
}

// auditSince reads the audit log, by user.
func auditSince(b *bed.Bed, since time.Time) (map[string]asked, error) {
	text, err := os.ReadFile(b.Path("log/audit.json"))
	if err != nil {
		return nil, err
	}
	all := map[string]asked{}
	for line := range bytes.Lines(text) {
		var e struct {
			Verb, RequestURI         string
			RequestReceivedTimestamp time.Time
			User                     struct{ Username string }
		}
		// The last line may be half written.
		if json.Unmarshal(line, &e) != nil || e.RequestReceivedTimestamp.Before(since) {
			continue
		}
		a := all[e.User.Username]
		if e.Verb == "list" || strings.Contains(e.RequestURI, "sendInitialEvents=true") {
			a.lists = append(a.lists, e.RequestURI)
		} else {
			a.watches++
		}
		all[e.User.Username] = a
	}
	return all, nil
}
