package intercept

import (
	"errors"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/dial"
)

// only is the single connection of c.
func only(t *testing.T, c *Conns) *Carried {
	t.Helper()
	eventually(t, "there is one connection", func() bool { return c.Len() == 1 })
	return c.Snapshot()[0]
}

func TestConnsCountBothWays(t *testing.T) {
	s := tell(t, 0, nil)
	client, far := s.pair(t)
	l := only(t, s.conns)
	eventually(t, "it is open", func() bool { return l.State() == ConnOpen })
	traffic := func(sent, received uint64) {
		t.Helper()
		eventually(t, "bytes are seen while the connection is open", func() bool {
			got, ok := l.Traffic()
			return ok && got.Sent == sent && got.Received == received
		})
	}
	traffic(0, 0)
	send(t, client, "question")
	readN(t, far, 8)
	send(t, far, "a longer answer")
	readN(t, client, 15)
	traffic(8, 15)
	if err := client.CloseWrite(); err != nil { // a FIN is no byte
		t.Fatal(err)
	}
	wantAll(t, far, "")
	traffic(8, 15)
	shut(far)
	wantAll(t, client, "")
	eventually(t, "it is taken out", func() bool { return s.conns.Len() == 0 })
	if _, ok := l.Traffic(); ok {
		t.Error("it has traffic after its end")
	}
	l.Abort(errors.New("too late")) // to no effect
}

func TestConnsKnowWhoIsQuiet(t *testing.T) {
	s := tell(t, 0, nil)
	busy, farBusy := s.pair(t)
	only(t, s.conns)
	s.pair(t)
	eventually(t, "both are there", func() bool { return s.conns.Len() == 2 })
	all := s.conns.Snapshot()
	if all[0].Target.Client != unmapped(busy.LocalAddr()) || all[1].Since.Before(all[0].Since) {
		t.Error("the oldest is not the first")
	}
	eventually(t, "one is quiet while the other is not", func() bool {
		send(t, busy, "x")
		readN(t, farBusy, 1)
		first, _ := all[0].Traffic()
		second, _ := all[1].Traffic()
		return second.Quiet >= 300*time.Millisecond && first.Quiet < 100*time.Millisecond
	})
}

// A connection can be ended from outside in every state, and both ends see a
// reset.
func TestConnsAbort(t *testing.T) {
	tooQuiet := errors.New("quiet for too long")
	s := tell(t, time.Hour, nil)
	client, far := s.pair(t)
	l := only(t, s.conns)
	eventually(t, "it is open", func() bool { return l.State() == ConnOpen })
	l.Abort(tooQuiet)
	wantReset(t, client)
	wantReset(t, far)
	eventually(t, "it is taken out", func() bool { return s.conns.Len() == 0 })

	s.gates.Set("kas", Held)
	client = s.dial(t)
	l = only(t, s.conns)
	if state := l.State(); state != ConnHeld {
		t.Errorf("it is %s, want held", state)
	}
	l.Abort(tooQuiet)
	wantReset(t, client)
	eventually(t, "it is taken out", func() bool { return s.conns.Len() == 0 })
}

func TestConnsDialling(t *testing.T) {
	s := tell(t, time.Hour, dead)
	client := s.dial(t)
	l := only(t, s.conns)
	eventually(t, "it is being dialled", func() bool { return l.State() == ConnDialling })
	l.Abort(dial.ErrLost)
	wantReset(t, client)
	eventually(t, "the reason is counted", func() bool { return s.metrics.of("refused_total lost") == 1 })
}
