package agent

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// knowing is a mode that knows who its clients are.
type knowing struct {
	*mode
	who intercept.Attribution
}

func (k knowing) Attribute(intercept.Taken) (intercept.Attribution, bool) { return k.who, true }

func (r *rig) conns() (all []ConnStatus) {
	r.t.Helper()
	resp, err := observe.SocketClient(r.cfg.Agent.Observe.AdminSocket).Get("http://agent/conns")
	if err != nil {
		r.t.Fatal(err)
	}
	defer shut(resp.Body)
	if err := json.NewDecoder(resp.Body).Decode(&all); err != nil {
		r.t.Fatal(err)
	}
	return all
}

// What is carried is listed with who made it and what has passed, and counted by
// target.
func TestConns(t *testing.T) {
	r := newRig(t)
	r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
		return []intercept.Candidate{{Name: "fake", New: func() (intercept.Mode, error) {
			return knowing{r.mode, intercept.Attribution{
				Original: kas, UID: 7, UIDKnown: true, PID: uint32(os.Getpid()), Command: "é\n\x01",
			}}, nil
		}}}, nil
	}
	r.links.set("kas")
	r.diverting()
	if all := r.conns(); len(all) != 0 {
		t.Errorf("before there are any: %+v", all)
	}
	open := r.carried(r.dial(kas))
	held, err := r.dial(other)
	if err != nil {
		t.Fatal(err)
	}
	var all []ConnStatus
	eventually(t, "both are there", func() bool {
		all = r.conns()
		return len(all) == 2 && all[0].State == intercept.ConnOpen && all[1].State == intercept.ConnHeld
	})
	got := all[0]
	if got.ID == "" || got.Target != "kas" || got.Client.String() != open.LocalAddr().String() || got.Pod || got.Original != kas ||
		got.UID == nil || *got.UID != 7 || got.Command != "é\n\x01" || got.Sent != 7 || got.Received != 7 || time.Since(got.Since) > bound {
		t.Errorf("the open one: %+v", got)
	}
	if line := got.CommandLine; line != "" && !strings.Contains(line, os.Args[0]) {
		t.Errorf("this process was not started as %q", line)
	}
	if got := all[1]; got.Target != "other" || got.Client.String() != held.LocalAddr().String() || got.Sent != 0 {
		t.Errorf("the held one: %+v", got)
	}
	for i, want := range []ConnCounts{{Open: 1}, {Held: 1}} {
		if s := r.status(); s.Targets[i].Connections != want {
			t.Errorf("target %s has %+v, want %+v", s.Targets[i].Name, s.Targets[i].Connections, want)
		}
	}
	shut(open)
	eventually(t, "it is gone", func() bool { return len(r.conns()) == 1 })
}

// Connections that come while it is still being proven that the mode works have
// an owner, too.
func TestTheFirstClientsAreKnown(t *testing.T) {
	r := newRig(t)
	commands := make(chan string, 100)
	way := r.cfg.Dial
	r.cfg.Dial = func(ctx context.Context, target dial.Target) (dial.Conn, error) {
		commands <- target.Command
		return way(ctx, target)
	}
	r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
		return []intercept.Candidate{{Name: "fake", New: func() (intercept.Mode, error) {
			return knowing{r.mode, intercept.Attribution{Command: "early"}}, nil
		}}}, nil
	}
	// Before the mode has even said that it diverts.
	r.mode.onApply = func(_ context.Context, st rules.State) error {
		c, err := net.Dial("tcp", netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), st.Diverts[0].Ports.Host4).String())
		if err != nil {
			return err
		}
		defer shut(c)
		select {
		case got := <-commands:
			if got != "early" {
				t.Errorf("the first client is called %q", got)
			}
			return nil
		case <-time.After(bound):
			return errors.New("the first client is not carried")
		}
	}
	r.links.set("kas")
	r.diverting()
	if len(r.mode.Applied()) == 0 {
		t.Error("nothing was applied")
	}
}
