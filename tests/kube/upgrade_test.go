//go:build kube

package kube

import (
	"context"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

// upgrade replaces the agent of a node by a second one that starts beside it.
// No connect of anybody fails, and nobody who watches lists again.
func upgrade(t *testing.T, b *bed.Bed) {
	must(t, "starting the load", b.StartLoad(t.Context()))
	must(t, "the load", check{do: loadRuns}.run(t.Context(), b, time.Minute))
	first, err := loadSoFar(b)
	must(t, "reading what the load got", err)
	began := time.Now()
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	took, err := b.Nodes[0].UpgradeAgent(ctx)
	must(t, "upgrading the agent", err)
	t.Logf("the new agent was ready after %.1f s, the former one gone after %.1f s", took.Ready.Seconds(), took.Ended.Seconds())
	relists(t, b, "former-agent", began)
	for answer, n := range errnos(t, b, "former-agent", began, time.Now()) {
		if answer != "" {
			t.Errorf("%d connects of the informers ended with %s", n, answer)
		}
	}
	noneFailed(t, b, first, began)
}
