package stories

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"syscall"
	"testing"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

const bulk = 5 << 20

// eachWay tells a story on each client and address of the target "raw" in every
// mode, with the far side of the connection at hand.
func eachWay(t *testing.T, story func(t *testing.T, client, server *net.TCPConn)) {
	for _, e := range everyScene {
		t.Run(e.mode, func(t *testing.T) {
			t.Parallel()
			s := e.scene.take(t)
			far := accepts(t, s.ControlPlane, raw4)
			same := s.steady(t)
			for _, h := range s.clients() {
				for _, to := range e.raw {
					t.Run(h.Label+" to "+to.String(), func(t *testing.T) {
						client, server := pair(t, h, to, far)
						story(t, client, server)
						shut(client, server)
					})
				}
			}
			same()
		})
	}
}

// One side says that it will send no more; the other then sends 5 MB, of which
// not a byte is lost, and ends cleanly.
func TestCase_B16_HalfClose(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, client, server *net.TCPConn) {
		if err := halfClose(client, server); err != nil {
			t.Error(err)
		}
	})
}

// The mirror of it: the server ends first.
func TestCase_B16_HalfCloseMirror(t *testing.T) {
	t.Parallel()
	eachWay(t, func(t *testing.T, client, server *net.TCPConn) {
		if err := halfClose(server, client); err != nil {
			t.Error(err)
		}
	})
}

// halfClose ends first's direction and sends bulk data the other way, then ends
// that too.
func halfClose(first, second *net.TCPConn) error {
	if _, err := first.Write([]byte("last words")); err != nil {
		return err
	}
	if err := first.CloseWrite(); err != nil {
		return err
	}
	if got, err := io.ReadAll(second); err != nil || string(got) != "last words" {
		return fmt.Errorf("the far side hears %q, %w", got, err)
	}
	data := make([]byte, bulk)
	_, _ = rand.NewChaCha8([32]byte{1}).Read(data) // never fails
	sent := make(chan error, 1)
	go func() {
		_, err := second.Write(data)
		sent <- errors.Join(err, second.CloseWrite())
	}()
	sum := sha256.New()
	n, err := io.Copy(sum, first) // nil only after a clean end
	if err = errors.Join(err, <-sent); err != nil {
		return fmt.Errorf("after %d of %d bytes: %w", n, bulk, err)
	}
	if want := sha256.Sum256(data); n != bulk || !bytes.Equal(sum.Sum(nil), want[:]) {
		return fmt.Errorf("%d bytes arrive, and not the %d that were sent", n, bulk)
	}
	return nil
}

// A reset arrives as a reset, whoever makes it, and never as a clean end.
func TestResetArrivesAsReset(t *testing.T) {
	t.Parallel()
	t.Run("client", func(t *testing.T) {
		eachWay(t, func(t *testing.T, client, server *net.TCPConn) {
			reset(t, client)
			isReset(t, "the far side", server, patience)
		})
	})
	t.Run("server", func(t *testing.T) {
		eachWay(t, func(t *testing.T, client, server *net.TCPConn) {
			reset(t, server)
			isReset(t, "the client", client, patience)
		})
	})
}

// newPlainScene is one with mode nft, without pods, firewall and kube-proxy.
func newPlainScene(t *testing.T, agent ...string) *scene {
	t.Helper()
	s := newScene(t, netns.Spec{})
	s.start(t, diverting("nft", agent...))
	return s
}

// The server is killed in the middle of a stream: its clients are reset, and
// later ones are served as soon as there is a server again.
func TestServerKilledMidStream(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	far := accepts(t, s.ControlPlane, raw4)
	client, server := pair(t, s.Node, raw4, far)
	killed := time.Now()
	if err := s.server.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	// The kernel ends the dead process's sockets, so the agent notices at once.
	isReset(t, "the client", client, time.Second)
	t.Logf("reset %s after the kill", time.Since(killed).Round(time.Millisecond))
	isReset(t, "the far side", server, patience)
	_ = s.server.Wait()
	if err := s.startServer(); err != nil {
		t.Fatal(err)
	}
	s.served(t, s.Node, svc4)
}

// The agent is killed in the middle of a stream: both ends are reset.
func TestAgentKilledMidStream(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	far := accepts(t, s.ControlPlane, raw4)
	client, server := pair(t, s.Node, raw4, far)
	if err := s.agent.Signal(syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	isReset(t, "the client", client, patience)
	isReset(t, "the far side", server, patience)
	_ = s.agent.Wait()
	s.startAgent(t, diverting("nft")...)
	s.served(t, s.Node, svc4)
}

// The path between agent and server goes silent: streams on it are reset when
// that is noticed, within 15 s, and new ones are served when it is back.
func TestLinkLostInSilence(t *testing.T) {
	t.Parallel()
	s := newPlainScene(t)
	far := accepts(t, s.ControlPlane, raw4)
	client, server := pair(t, s.Node, raw4, far)
	const drop = `table inet silence {
	chain in { type filter hook input priority -10; tcp dport 8091 drop; }
	chain out { type filter hook output priority -10; tcp sport 8091 drop; }
}`
	if _, err := s.ControlPlane.RunInput(drop, "nft", "-f", "-"); err != nil {
		t.Fatal(err)
	}
	cut := time.Now()
	isReset(t, "the client", client, 16*time.Second)
	t.Logf("reset %s after the silence began", time.Since(cut).Round(100*time.Millisecond))
	isReset(t, "the far side", server, 16*time.Second)
	if _, err := s.ControlPlane.Run("nft", "delete", "table", "inet", "silence"); err != nil {
		t.Fatal(err)
	}
	s.served(t, s.Node, svc4)
}
