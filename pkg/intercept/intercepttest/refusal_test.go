package intercepttest

import (
	"context"
	"errors"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

// picky is a mode whose preflight gives one answer.
type picky struct {
	intercept.Mode
	report intercept.Report
}

func (p picky) Preflight(context.Context) intercept.Report { return p.report }

// pickyReports are answers to a node with a bridge, and what the suite says
// of them where the mode must refuse it because of "bridge-nf".
var pickyReports = map[string]struct {
	report intercept.Report
	saying string
}{
	"picky-right":        {intercept.NotSupported("switch it off", "bridge-nf is on"), ""},
	"picky-admits":       {intercept.Report{}, "want that this node is not supported"},
	"picky-inconclusive": {intercept.Report{Err: errors.New("bridge-nf is on"), Remedy: "switch it off"}, "want that this node is not supported"},
	"picky-other-reason": {intercept.NotSupported("switch it off", "no TUN device"), "in it"},
	"picky-no-remedy":    {intercept.NotSupported("", "bridge-nf is on"), "names no remedy"},
}

func pickyFactory(name string) Factory {
	return Factory{
		Name: name,
		New: func(logrus.FieldLogger) (intercept.Mode, error) {
			return picky{&reference{}, pickyReports[name].report}, nil
		},
		Cleanup: func(context.Context) error { return nil },
		Refuses: func(Node) string { return "bridge-nf" },
	}
}

// A refused cell is shown as refused only if the preflight refuses it, for the
// stated reason and with a remedy.
func TestRefusalIsJudged(t *testing.T) {
	netns.Require(t)
	for name, c := range pickyReports {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			table := &Table{}
			err := errors.Join(build(t, fullNode(netns.NoKubeProxy)).refusal(t, pickyFactory(name), table)...)
			shown := strings.Contains(table.String(), "refused")
			switch {
			case c.saying == "" && (err != nil || !shown):
				t.Errorf("a right refusal: %v\n%s", err, table)
			case c.saying != "" && (err == nil || !strings.Contains(err.Error(), c.saying)):
				t.Errorf("want an error saying %q, got: %v", c.saying, err)
			case c.saying != "" && shown:
				t.Errorf("shown as refused all the same:\n%s", table)
			}
		})
	}
}
