package intercepttest

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
	"github.com/kasway/kasway/tests/netns"
)

// patience bounds one connect and one answer where nothing should hinder it;
// the machines that run this are busy.
const patience = 5 * time.Second

// Table is the outcome of the matrix: rows are client, family and destination,
// columns are kube-proxies.
type Table struct {
	Mode  string
	rows  []string
	cells map[string]map[netns.KubeProxy]string
}

// set enters word, or FAIL for ever.
func (t *Table) set(row string, col netns.KubeProxy, word string, err error) {
	if t.cells == nil {
		t.cells = map[string]map[netns.KubeProxy]string{}
	}
	if t.cells[row] == nil {
		t.rows = append(t.rows, row)
		t.cells[row] = map[netns.KubeProxy]string{}
	}
	switch {
	case err != nil:
		t.cells[row][col] = "FAIL"
	case t.cells[row][col] == "":
		t.cells[row][col] = word
	}
}

func (t *Table) String() string {
	var b strings.Builder
	width := 26 // of a table without long rows
	for _, row := range t.rows {
		width = max(width, len(row))
	}
	fmt.Fprintf(&b, "%-*s", width, "mode "+t.Mode)
	for _, p := range netns.KubeProxies {
		fmt.Fprintf(&b, "  %-15s", p)
	}
	for _, row := range t.rows {
		fmt.Fprintf(&b, "\n%-*s", width, row)
		for _, p := range netns.KubeProxies {
			entry := t.cells[row][p]
			if entry == "" {
				entry = "-"
			}
			fmt.Fprintf(&b, "  %-15s", entry)
		}
	}
	return b.String() + "\n"
}

// Run is the matrix: with the mode off every client reaches the KAS with its
// own address; with the mode on it reaches the right target's listener on the
// right side, which sees the client's own address; what is no target's is
// left alone; and after Close and Cleanup all is as before. The table is
// logged, and appended to the file that KASWAY_MATRIX_OUT names.
func Run(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	table := &Table{Mode: f.Name}
	for _, proxy := range netns.KubeProxies {
		t.Run("kube-proxy="+string(proxy), func(t *testing.T) { column(t, f, proxy, table) })
	}
	table.show(t)
}

// show logs the table, and appends it to the file that KASWAY_MATRIX_OUT names.
func (t *Table) show(tt *testing.T) {
	tt.Helper()
	tt.Logf("\n%s", t)
	if path := os.Getenv("KASWAY_MATRIX_OUT"); path != "" {
		out, err := os.OpenFile(path, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
		if err != nil {
			tt.Fatal(err)
		}
		defer out.Close()
		if _, err := fmt.Fprintln(out, t); err != nil {
			tt.Fatal(err)
		}
	}
}

// column runs one column. A node that the mode refuses is proven to be refused,
// and the clients that can be carried are tried on a node that has no others.
func column(t *testing.T, f Factory, proxy netns.KubeProxy, table *Table) {
	if n := f.node(proxy); f.refuses(n) == "" {
		report(t, errors.Join(build(t, n).matrix(t, f, table)...))
	}
	if full := fullNode(proxy); f.refuses(full) != "" {
		report(t, errors.Join(build(t, full).refusal(t, f, table)...))
	}
}

// refusal proves that the preflight refuses the node, says why and what to do
// about it, and leaves everything as it is.
func (w *world) refusal(t *testing.T, f Factory, table *Table) (errs []error) {
	before, err := w.snapshot()
	if err != nil {
		return []error{err}
	}
	h := start(t, w, f)
	switch r := h.Preflight(); {
	case !errors.Is(r.Err, intercept.ErrNotSupported):
		errs = append(errs, fmt.Errorf("preflight says %v, want that this node is not supported", r.Err))
	case !strings.Contains(r.Err.Error(), f.refuses(w.node)):
		errs = append(errs, fmt.Errorf("preflight refuses with %q, want %q in it", r.Err, f.refuses(w.node)))
	case r.Remedy == "":
		errs = append(errs, fmt.Errorf("preflight refuses (%w) and names no remedy", r.Err))
	}
	refused := errors.Join(errs...)
	for _, c := range w.cells("kas", "other") {
		err := reachesKAS(c)
		if err != nil {
			errs = append(errs, fmt.Errorf("after a refusal: %s %s: %w", c, c.to.addr, err))
		}
		table.set(c.String(), w.node.KubeProxy, "refused", errors.Join(refused, err))
	}
	return append(errs, h.End(), leftovers(w, before))
}

// RunBridge is the matrix for pods on a bridge, with and without bridged
// packets passing the host's packet filters.
func RunBridge(t *testing.T, f Factory) {
	t.Helper()
	netns.Require(t)
	for _, nf := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge-nf=%t", nf), func(t *testing.T) {
			n := Node{netns.IptablesNFT, true, nf}
			run := (*world).matrix
			if f.refuses(n) != "" {
				run = (*world).refusal
			}
			report(t, errors.Join(run(build(t, n), t, f, &Table{})...))
		})
	}
}

// build makes a world that ends with the test.
func build(t *testing.T, n Node) *world {
	t.Helper()
	w, err := newWorld(n)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.close(); err != nil {
			t.Error(err)
		}
	})
	return w
}

// start starts a holder whose log is shown if the test fails.
func start(t *testing.T, w *world, f Factory) *Holder {
	t.Helper()
	h, err := Start(w.Node, f)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			t.Logf("the holder of %s logged:\n%s", f.Name, h.Log())
		}
	})
	return h
}

// matrix runs one column and enters it into the table.
func (w *world) matrix(t *testing.T, f Factory, table *Table) (errs []error) {
	own, taken := w.cells("kas", "other"), w.taken(f, "kas", "other")
	word := "ok"
	if f.Places != nil {
		word = "left alone" // which is what such a mode does to the targets' own addresses
	}
	check := func(what string, cells []cell, one func(cell) error) {
		for _, c := range cells {
			err := one(c)
			if c.to.kind == "place" {
				table.set(c.String(), w.node.KubeProxy, "ok", err)
			} else {
				table.set(c.String(), w.node.KubeProxy, word, err)
			}
			if err != nil {
				errs = append(errs, fmt.Errorf("%s: %s %s: %w", what, c, c.to.addr, err))
			}
		}
	}
	check("before the mode is on", own, reachesKAS)
	h := start(t, w, f)
	if r := h.Preflight(); r.Err != nil {
		return append(errs, fmt.Errorf("preflight: %w (%s)", r.Err, r.Remedy))
	}
	check("after preflight", own, reachesKAS) // which changes nothing
	if _, err := h.Apply(firstState(f)); err != nil {
		return append(errs, err)
	}
	check("with the mode on", taken, diverted)
	if f.Places != nil {
		check("with the mode on", own, reachesKAS)
	}
	errs = append(errs, w.attached(f.Hooks))
	errs = append(errs, w.bystanders()...)
	if err := errors.Join(h.Close(), h.Cleanup()); err != nil {
		return append(errs, err)
	}
	check("after cleanup", own, reachesKAS)
	if err := h.End(); err != nil {
		errs = append(errs, err)
	}
	return errs
}

// ask connects once and returns the answer and the client's own end.
func ask(from *netns.Host, to netip.AddrPort, withMark bool) (a Answer, local netip.AddrPort, err error) {
	flow, err := Connect(from, to, withMark, patience)
	if err != nil {
		return a, local, err
	}
	defer flow.End()
	a, err = flow.Ask(patience)
	return a, addrPort(flow.LocalAddr()), err
}

func reachesKAS(c cell) error {
	a, _, err := ask(c.client, c.to.addr, false)
	if err != nil {
		return err
	}
	return isDirect(c, a)
}

func isDirect(c cell, a Answer) error {
	switch {
	case a.Who != direct:
		return fmt.Errorf("reached %s, want the KAS", a.Who)
	case a.Local != c.to.endpoint:
		return fmt.Errorf("reached the KAS at %s, want %s", a.Local, c.to.endpoint)
	case a.Peer.Addr() != c.own():
		return fmt.Errorf("the KAS sees %s, want the client's own %s", a.Peer.Addr(), c.own())
	}
	return nil
}

func diverted(c cell) error {
	a, local, err := ask(c.client, c.to.addr, false)
	if err != nil {
		return err
	}
	return isDiverted(c, a, local)
}

func isDiverted(c cell, a Answer, local netip.AddrPort) error {
	side := "host"
	if c.pod {
		side = "pods"
	}
	switch {
	case a.Who != c.to.target:
		return fmt.Errorf("reached %s, want the listener of %s", a.Who, c.to.target)
	case a.Side != side && a.Side != "":
		return fmt.Errorf("reached the %s listener, want that for %s", a.Side, side)
	case a.ID == 0:
		return errors.New("the connection has no id")
	case a.Peer != local:
		return fmt.Errorf("the listener sees %s, want the client's own %s", a.Peer, local)
	}
	return nil
}

// bystanders are connections that no mode may touch: to another port of a
// KAS, and (as a pod's own service has) to the captured port of a local address.
func (w *world) bystanders() (errs []error) {
	self := netip.AddrPortFrom(w.Node.Addr4, endpointPort)
	if err := w.answerAt(w.Node, self, "the node itself"); err != nil {
		return []error{err}
	}
	for _, c := range w.cells("kas") {
		for to, want := range map[netip.AddrPort]string{
			self: "the node itself",
			netip.AddrPortFrom(c.to.endpoint.Addr(), otherPort): direct,
		} {
			a, _, err := ask(c.client, to, false)
			if err != nil || a.Who != want {
				errs = append(errs, fmt.Errorf("bystander: %s to %s: reached %q, %v; want %s", c.label, to, a.Who, err, want))
			}
		}
	}
	return errs
}

// firstState is what tests that do not care about WhenDown apply.
func firstState(f Factory) rules.State { return State(f.whenDown()[0]) }
