package iptables

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
)

// A preflight makes no table that was not there: neither back end would ever
// take it back.
func TestPreflight_MakesNoTable(t *testing.T) {
	l := newLab(t)
	tables := func(h *netns.Host) (found string) {
		t.Helper()
		err := h.Do(func() error {
			nft, err := exec.Command("nft", "list", "tables").Output()
			legacy4, err4 := os.ReadFile("/proc/thread-self/net/ip_tables_names")
			legacy6, err6 := os.ReadFile("/proc/thread-self/net/ip6_tables_names")
			found = string(nft) + string(legacy4) + string(legacy6)
			return errors.Join(err, err4, err6)
		})
		if err != nil {
			t.Fatal(err)
		}
		return found
	}
	pristine, err := l.Host("pristine")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range []backEnd{nft, legacy} {
		m := New(Config{})
		if err := pristine.Do(func() (err error) {
			if m.tools, err = findTools(b, m.run); err != nil {
				return err
			}
			m.back = b
			return m.Preflight(context.Background()).Err
		}); err != nil {
			t.Errorf("%s: %v", b, err)
		}
		if got := tables(pristine); got != "" {
			t.Errorf("%s: the preflight has made tables: %q", b, got)
		}
		// What is used already is tried in its place.
		var inputs []string
		m.run = func(ctx context.Context, input, name string, args ...string) ([]byte, error) {
			if own, err := os.Readlink("/proc/thread-self/ns/net"); strings.Contains(name, "-restore") && err == nil {
				inputs = append(inputs, own+input)
			}
			return run(ctx, input, name, args...)
		}
		if _, err := l.Node.Run(toolName(b, false), "-t", "nat", "-A", "OUTPUT", "-p", "udp", "-j", "ACCEPT"); err != nil {
			t.Fatal(err)
		}
		var node string
		err := l.Node.Do(func() (err error) {
			if node, err = os.Readlink("/proc/thread-self/ns/net"); err != nil {
				return err
			}
			if m.tools, err = findTools(b, m.run); err != nil {
				return err
			}
			return m.probe(context.Background(), false)
		})
		if err != nil {
			t.Errorf("%s: %v", b, err)
		}
		inPlace := map[string]bool{}
		for _, in := range inputs {
			inPlace["nat"] = inPlace["nat"] || strings.HasPrefix(in, node+"*nat")
			inPlace["filter"] = inPlace["filter"] || strings.HasPrefix(in, node+"*filter")
		}
		if b == legacy && (!inPlace["nat"] || inPlace["filter"]) {
			t.Errorf("%s: tried in place: %v, want nat alone", b, inPlace)
		}
		if !inPlace["nat"] {
			t.Errorf("%s: table nat was not tried in its place: %q", b, inputs)
		}
	}
}

// Nothing of the thread's namespace is seen, or left, by what runs in scratch.
func TestInScratch(t *testing.T) {
	netns.Require(t)
	link := func() string {
		own, err := os.Readlink("/proc/thread-self/ns/net")
		if err != nil {
			t.Error(err)
		}
		return own
	}
	var inside string
	want := errors.New("this one")
	if err := inScratch(func() error { inside = link(); return want }); !errors.Is(err, want) {
		t.Errorf("%v, want the function's", err)
	}
	if now := link(); inside == "" || inside == now {
		t.Errorf("ran in %q, and the thread is in %q", inside, now)
	}
	var st unix.Stat_t
	if err := unix.Stat("/proc/self/ns/net", &st); err != nil {
		t.Error(err)
	}
}
