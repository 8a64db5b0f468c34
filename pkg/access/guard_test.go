package access

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/testutil"
	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/dial"
)

func TestCase_B68_DestinationNotAllowed(t *testing.T) {
	reg := prometheus.NewRegistry()
	m := NewServerMetrics(reg)
	log, hook := quiet()
	end := &dialled{}
	guard := Guard(mustPolicy(t, PolicyConfig{AllowedDestinations: []string{"kas.example:6443"}, Upstreams: []string{"etcd"}}), log, m, end.dial)
	ctx := With(t.Context(), Identity{Name: "node1", TrustDomain: "prod"})

	c, err := guard(ctx, dial.Target{
		ID: "c1", Name: "etcd.example:2379", Workload: "pod/evil",
		Client:   netip.MustParseAddrPort("10.1.0.7:4711"),
		Original: netip.MustParseAddrPort("10.96.0.1:443"),
	})
	if c != nil || !errors.Is(err, dial.ErrDenied) || dial.NotDialled(err) {
		t.Fatalf("%v %v, want a denial that no other link may retry", c, err)
	}
	if len(end.names) != 0 {
		t.Errorf("dialled %v", end.names)
	}
	if n := testutil.ToFloat64(m.refused.WithLabelValues("unknown-target")); n != 1 {
		t.Errorf("counted %v refusals", n)
	}
	if len(hook.Entries) != 1 {
		t.Fatalf("%d audit lines", len(hook.Entries))
	}
	want := logrus.Fields{
		"agent": "spiffe://prod/agent/node1", "target": "etcd.example:2379", "client": "10.1.0.7:4711",
		"original": "10.96.0.1:443", "workload": "pod/evil", "reason": "unknown-target", "conn": "c1",
	}
	if got := hook.LastEntry(); got.Message != "refused by policy" || fmt.Sprint(got.Data) != fmt.Sprint(want) {
		t.Errorf("audit line %q %v, want %v", got.Message, got.Data, want)
	}
	// What is there and what is not is no business of the agent's.
	if strings.Contains(err.Error(), "unknown") {
		t.Errorf("the agent is told %q", err)
	}
	if problems, err := testutil.GatherAndLint(reg); err != nil || len(problems) > 0 {
		t.Errorf("metrics: %v %v", problems, err)
	}

	if c, err := guard(ctx, dial.Target{Name: "kas"}); err != nil || c != &end.conn {
		t.Errorf("the allowed destination: %v %v", c, err)
	}
	if fmt.Sprint(end.names) != "[kas.example:6443]" {
		t.Errorf("dialled %v", end.names)
	}
	if len(hook.Entries) != 1 {
		t.Errorf("what is allowed was audited as a refusal: %v", hook.LastEntry().Data)
	}

	if c, err := guard(ctx, dial.Target{Name: "etcd"}); c != nil || !errors.Is(err, dial.ErrDenied) {
		t.Errorf("an upstream that is granted to nobody: %v %v", c, err)
	}
	if len(end.names) != 1 || len(hook.Entries) != 2 || testutil.ToFloat64(m.refused.WithLabelValues("forbidden")) != 1 {
		t.Errorf("dialled %v, %d audit lines", end.names, len(hook.Entries))
	}
}

func TestGuardWithoutIdentity(t *testing.T) {
	log, hook := quiet()
	end := &dialled{}
	guard := Guard(mustPolicy(t, PolicyConfig{AllowedDestinations: []string{"kas.example:6443"}}), log, nil, end.dial)
	if _, err := guard(t.Context(), dial.Target{Name: "kas"}); !errors.Is(err, dial.ErrDenied) {
		t.Errorf("nobody was let in: %v", err)
	}
	if len(end.names) != 0 || len(hook.Entries) != 1 || hook.LastEntry().Data["reason"] != "unidentified" {
		t.Errorf("dialled %v, audited %v", end.names, hook.Entries)
	}
}

func TestGuardAuditsDenialsBehindIt(t *testing.T) {
	log, hook := quiet()
	m := NewServerMetrics(prometheus.NewRegistry())
	behind := func(context.Context, dial.Target) (dial.Conn, error) {
		return nil, fmt.Errorf("dialling: %w", &Denial{ReasonAddress, "evil.example resolves to [127.0.0.1]"})
	}
	guard := Guard(mustPolicy(t, PolicyConfig{AllowedDestinations: []string{"evil.example:1"}}), log, m, behind)
	_, _ = guard(With(t.Context(), Identity{Name: "n"}), dial.Target{Name: "kas"})
	if len(hook.Entries) != 1 || hook.LastEntry().Data["reason"] != "address" || hook.LastEntry().Data["target"] != "kas" {
		t.Errorf("audited %v", hook.Entries)
	}
	if n := testutil.ToFloat64(m.refused.WithLabelValues("address")); n != 1 {
		t.Errorf("counted %v", n)
	}
}

func TestAuditLineOfHostileText(t *testing.T) {
	var out strings.Builder
	log := logrus.New()
	log.SetOutput(&out)
	log.SetFormatter(&logrus.JSONFormatter{})
	guard := Guard(mustPolicy(t, PolicyConfig{}), log, nil, nil)
	zone := netip.AddrPortFrom(netip.MustParseAddr("fe80::1").WithZone("é\n\x1b[2J"), 1)
	_, err := guard(With(t.Context(), Identity{Name: "n"}), dial.Target{
		ID: "\x00\xff", Name: strings.Repeat("x\n", 10000), Workload: "é\n\x01", Client: zone, Original: zone,
		PID: 42, Command: "\x1b]0;é\n",
	})
	if strings.ContainsAny(err.Error(), "\n\x1b") || len(err.Error()) > 2000 {
		t.Errorf("error text %q", err)
	}
	if lines := strings.Count(out.String(), "\n"); lines != 1 || len(out.String()) > 4000 {
		t.Errorf("%d lines, %d bytes", lines, out.Len())
	}
	var line map[string]any
	if err := json.Unmarshal([]byte(out.String()), &line); err != nil {
		t.Fatal(err)
	}
	if line["workload"] != `é\n\x01` || line["command"] != `\x1b]0;é\n` || line["pid"] != 42.0 ||
		strings.ContainsAny(fmt.Sprint(line["client"], line["original"], line["conn"]), "\n\x1b\x00") {
		t.Errorf("line %v", line)
	}
}

// A flood of refusals costs a bounded number of lines, and none is dropped.
func TestAuditOfAFlood(t *testing.T) {
	const agents, each = 2 * auditAskers, 20
	log, hook := quiet()
	m := NewServerMetrics(prometheus.NewRegistry())
	guard := Guard(mustPolicy(t, PolicyConfig{}), log, m, nil)
	start := time.Now()
	var wg sync.WaitGroup
	for i := range agents {
		ctx := With(t.Context(), Identity{Name: fmt.Sprintf("node%d", i)})
		wg.Go(func() {
			for range each {
				if _, err := guard(ctx, dial.Target{Name: "kas"}); !errors.Is(err, dial.ErrDenied) {
					t.Errorf("not denied: %v", err)
				}
			}
		})
	}
	wg.Wait()
	sum := func() (sum int) {
		for _, e := range hook.AllEntries() {
			if n, ok := e.Data[FieldCount].(int); ok {
				sum += n
			} else {
				sum++
			}
		}
		return sum
	}
	for deadline := time.Now().Add(10 * time.Second); sum() < agents*each; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("the lines account for %d of %d refusals", sum(), agents*each)
		}
	}
	seconds := time.Since(start).Seconds()
	most := auditBurst + int((auditRate+auditAskers+2)*(seconds+1))
	if n := len(hook.AllEntries()); n > most || sum() != agents*each {
		t.Errorf("%d lines (at most %d) for %d refusals, which count %d", n, most, agents*each, sum())
	}
	if n := testutil.ToFloat64(m.refused.WithLabelValues("unknown-target")); n != agents*each {
		t.Errorf("counted %v", n)
	}
}
