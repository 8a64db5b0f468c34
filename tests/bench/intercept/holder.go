package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/pkg/rules"
)

// What the holder can be asked.
const (
	opOff    = "off"    // remove everything of the mode's
	opOn     = "on"     // divert
	opRefuse = "refuse" // answer ECONNREFUSED
)

type holderRequest struct {
	Op string
	// State is to be applied; the holder fills in the ports.
	State rules.State
}

// holder is the role "holder": one mode, and listeners that stay open whether it
// diverts or not, so that the same ones can be reached without it.
type holder struct {
	maker maker
	mode  intercept.Mode
	ports map[string]rules.Ports
}

func runHolder(name, cgroup string) error {
	m, ok := makers(cgroup)[name]
	if !ok {
		return fmt.Errorf("no such mode: %s", name)
	}
	h := &holder{maker: m, ports: map[string]rules.Ports{}}
	return answerAll(h.do)
}

// do returns the ports of the listeners.
func (h *holder) do(q holderRequest) (map[string]rules.Ports, error) {
	ctx, cancel := context.WithTimeout(context.Background(), 20*time.Second)
	defer cancel()
	if err := h.listen(&q.State); err != nil {
		return nil, err
	}
	if q.Op == opOff {
		return h.ports, h.off(ctx)
	}
	for i := range q.State.Diverts {
		q.State.Diverts[i].Refused = q.Op == opRefuse
	}
	if h.mode == nil {
		log := logrus.New()
		log.SetOutput(os.Stderr)
		log.SetLevel(logrus.ErrorLevel)
		mode, err := h.maker.make(log)
		if err != nil {
			return nil, err
		}
		if r := mode.Preflight(ctx); r.Err != nil {
			return nil, fmt.Errorf("preflight: %w (%s)", r.Err, r.Remedy)
		}
		h.mode = mode
	}
	return h.ports, h.mode.Apply(ctx, q.State)
}

func (h *holder) off(ctx context.Context) error {
	if h.mode == nil {
		return nil
	}
	err := errors.Join(h.mode.Close(), h.maker.cleanup(ctx))
	h.mode = nil
	return err
}

// listen enters the ports of each target's listeners, opening them first.
func (h *holder) listen(s *rules.State) error {
	for i := range s.Diverts {
		d := &s.Diverts[i]
		if ports, ok := h.ports[d.Name]; ok {
			d.Ports = ports
			continue
		}
		open, err := h.maker.open(s, d)
		if err != nil {
			return err
		}
		for _, l := range open {
			go serve(l.Listener)
		}
		h.ports[d.Name] = d.Ports
	}
	return nil
}

// serve echoes or discards, as a connection's first byte says, until the
// process ends.
func serve(l net.Listener) {
	for {
		c, err := l.Accept()
		if err != nil {
			return
		}
		go func() {
			defer c.Close()
			buf := make([]byte, 256<<10)
			n, err := c.Read(buf)
			if err != nil || n == 0 {
				return
			}
			if buf[0] == discards {
				_, _ = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{c}, buf)
				return
			}
			for err == nil {
				if _, err = c.Write(buf[:n]); err == nil {
					n, err = c.Read(buf)
				}
			}
		}()
	}
}

// openListeners opens plain listeners, as every mode but tproxy wants them.
func openListeners(s *rules.State, d *rules.Divert) ([]intercepttest.Listener, error) {
	return intercepttest.OpenListeners(s, d)
}

// openTransparent opens listeners that may accept connections to any address.
func openTransparent(s *rules.State, d *rules.Divert) ([]intercepttest.Listener, error) {
	return intercepttest.OpenTransparentListeners(s, d)
}

// listenerOf is the address at which a client reaches a target's listener
// without any mode.
func listenerOf(s rules.State, p rules.Ports, pod bool) netip.AddrPort {
	if pod {
		return netip.AddrPortFrom(s.Node4, p.Pod4)
	}
	return netip.AddrPortFrom(netip.AddrFrom4([4]byte{127, 0, 0, 1}), p.Host4)
}
