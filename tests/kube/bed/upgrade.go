package bed

import (
	"context"
	"encoding/json"
	"fmt"
	"time"
)

// Upgraded is how long an upgrade took, from the start of the new agent.
type Upgraded struct {
	Ready time.Duration // until the new one was
	Ended time.Duration // until the former one had ended
}

// agentStatus is as much of an agent's status as is looked at here.
type agentStatus struct {
	Generation string
	Ready      bool
	NotReady   string
}

// UpgradeAgent replaces the agent that is a process of the node, as a surge does
// with a pod: a second one is started, and the first told to end when that is
// ready.
func (n *Node) UpgradeAgent(ctx context.Context) (u Upgraded, err error) {
	former, err := n.agentStatus(ctx)
	if err != nil {
		return u, err
	}
	name, leaving := n.named(Agent), n.named(Agent+"-former")
	if err := n.bed.rename(name, leaving); err != nil {
		return u, err
	}
	began := time.Now()
	if err := n.agentProcess(name); err != nil {
		return u, err
	}
	if err := Poll(ctx, time.Minute, func() error {
		now, err := n.agentStatus(ctx)
		if err == nil && (now.Generation == former.Generation || !now.Ready) {
			err = fmt.Errorf("agent %s, former %s: %s", now.Generation, former.Generation, now.NotReady)
		}
		return err
	}); err != nil {
		return u, fmt.Errorf("the new agent: %w", err)
	}
	u.Ready = time.Since(began)
	err = n.bed.Terminate(ctx, leaving)
	u.Ended = time.Since(began)
	return u, err
}

func (n *Node) agentStatus(ctx context.Context) (s agentStatus, err error) {
	out, err := n.Ask(ctx, "status", "-o", "json")
	if err != nil {
		return s, err
	}
	return s, json.Unmarshal([]byte(out), &s)
}
