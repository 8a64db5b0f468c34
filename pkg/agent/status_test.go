package agent

import (
	"encoding/json"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

func TestReadinessText(t *testing.T) {
	r := newRig(t)
	chosen := make(chan struct{})
	r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
		c := r.candidate("fake")
		c.New = func() (intercept.Mode, error) {
			<-chosen
			return r.mode, nil
		}
		return []intercept.Candidate{c}, nil
	}
	r.start()
	want := func(text string) {
		t.Helper()
		got := ""
		eventually(t, text, func() bool {
			if _, err := r.ask(); err != nil {
				return false
			}
			got = r.ready()
			return got == text
		})
	}
	want("not ready: nothing is diverted yet")
	close(chosen)
	want("not ready: no way to kas, other: no link to a server is up")
	r.links.show(LinkStatus{Server: "a:1", State: "connecting"}, LinkStatus{Server: "b:1", State: LinkUp})
	want("not ready: no way to kas, other: the servers report the upstreams as down")
	r.links.set("kas")
	want("not ready: no way to other: the servers report the upstreams as down")
	r.links.set("kas", "other")
	want("ok")
	if s := r.status(); !s.Ready || s.NotReady != "" {
		t.Errorf("status says ready: %v, %q", s.Ready, s.NotReady)
	}
}

// The shape of the status is what scripts rely on.
func TestStatusJSON(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Intercept.NodeIPv6 = "fd77::7"
	since := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	r.links.show(
		LinkStatus{Server: "192.0.2.1:8091", State: LinkUp, Since: since, RTT: time.Millisecond, Version: "v1", Streams: 3, Targets: map[string]bool{"kas": true}},
		LinkStatus{Server: "192.0.2.2:8091", State: "waiting", Since: since, LastError: "no route"},
	)
	r.links.set("kas")
	r.cfg.Modes = func(Parts) (try, others []intercept.Candidate) {
		lacks := func() (intercept.Mode, error) { return nil, errors.New("no such kernel") }
		return []intercept.Candidate{{Name: "better", New: lacks}, r.candidate("fake")}, nil
	}
	r.diverting()
	r.wantStates("open", "held")
	s := r.status()
	if s.Started.IsZero() || time.Since(s.Started) > bound {
		t.Errorf("started %s", s.Started)
	}
	s.Version, s.Started = "VERSION", since
	for i := range s.State.Diverts { // the kernel has chosen these
		s.State.Diverts[i].Ports = rules.Ports{Host4: 1, Host6: 2, Pod4: 3, Pod6: 4}
	}
	got, err := json.MarshalIndent(s, "", "  ")
	if err != nil {
		t.Fatal(err)
	}
	golden(t, "status.json", string(got)+"\n")
}

// What rules shows is what run installs, but for what the kernel chooses.
func TestDryRunIsWhatRunApplies(t *testing.T) {
	for name, change := range map[string][2]string{
		"as it is":  {"", ""},
		"host":      {"clients: [host, pods]", "clients: [host]"},
		"pods":      {"clients: [host, pods]", "clients: [pods]"},
		"direct":    {"clients: [host, pods]", "clients: [host, pods], whenDown: direct"},
		"addresses": {"clients: [host, pods]", `clients: [pods], nodeAddresses: {ipv4: 169.254.77.3, ipv6: "fd77::3"}`},
		"prefix":    {"10.96.0.2:443", "10.97.0.0/16:443"},
		"exact":     {"{name: other,", "{name: other, exact: true,"},
	} {
		t.Run(name, func(t *testing.T) {
			r := newRig(t)
			a := parse(t, strings.Replace(text, change[0], change[1], 1))
			a.Observe.AdminSocket = r.cfg.Agent.Observe.AdminSocket
			r.cfg.Agent = a
			r.diverting()
			dry, err := DryRun(t.Context(), a, r.cfg.Log)
			if err != nil {
				t.Fatal(err)
			}
			ran := r.mode.Applied()[0]
			if len(ran.Diverts) != len(dry.Diverts)+1 {
				t.Fatalf("%d diverts applied, %d shown, want one less", len(ran.Diverts), len(dry.Diverts))
			}
			if ran.Generation != "gen1" || a.Intercept.NodeIPv6 == "" && ran.Node6 == dryRunNode6 {
				t.Errorf("it runs as the dry run: %s %s", ran.Generation, ran.Node6)
			}
			ran.Generation = DryRunGeneration
			if a.Intercept.NodeIPv6 == "" {
				ran.Node6 = dryRunNode6
			}
			ran.Diverts = append([]rules.Divert(nil), ran.Diverts[:len(dry.Diverts)]...)
			for i, d := range dry.Diverts {
				had := ran.Diverts[i].Ports
				if (had.Host4 == 0) != (d.Ports.Host4 == 0) || (had.Host6 == 0) != (d.Ports.Host6 == 0) ||
					(had.Pod4 == 0) != (d.Ports.Pod4 == 0) || (had.Pod6 == 0) != (d.Ports.Pod6 == 0) {
					t.Errorf("%s listens on %+v, the dry run shows %+v", d.Name, had, d.Ports)
				}
				ran.Diverts[i].Ports = d.Ports
			}
			if !sameState(ran, dry) {
				t.Errorf("applied\n%+v\nshown\n%+v", ran, dry)
			}
			if got, want := rules.RenderNFT(ran), rules.RenderNFT(dry); got != want {
				t.Errorf("applied\n%s\nshown\n%s", got, want)
			}
		})
	}
}

func TestNodeAddresses(t *testing.T) {
	for change, want := range map[[2]string]string{
		{"", ""}: "169.254.77.1 intercept.nodeAddresses.ipv4",
		{"clients: [host, pods]", `clients: [pods], nodeAddresses: {ipv4: 169.254.77.3, ipv6: "fd77::1"}`}: "169.254.77.3 intercept.nodeAddresses.ipv4, fd77::1 intercept.nodeAddresses.ipv6",
	} {
		a := parse(t, strings.Replace(text, change[0], change[1], 1))
		all, err := NodeAddresses(a.Intercept)
		if err != nil {
			t.Fatal(err)
		}
		var got []string
		for _, n := range all {
			got = append(got, n.Addr.String()+" "+n.Setting)
		}
		if strings.Join(got, ", ") != want {
			t.Errorf("%v, want %s", got, want)
		}
	}
	a := parse(t, text).Intercept
	a.Mode, a.BindAddress = "listen", "169.254.77.2"
	all, err := NodeAddresses(a)
	if err != nil || len(all) != 1 || all[0].Addr != netip.MustParseAddr("169.254.77.2") || !all[0].Borrow {
		t.Errorf("mode listen: %+v, %v", all, err)
	}
}

// Links go to the servers' addresses by ways that no client may come from.
func TestServerAddresses(t *testing.T) {
	r := newRig(t)
	r.cfg.Agent.Links.Servers = []string{"192.0.2.1:8091", "[fd00::1]:8091", "kasway.example:8091", "nonsense"}
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer shut(l)
	link, err := r.cfg.Own.DialContext(t.Context(), "tcp", l.Addr().String()) // where a name has led to
	if err != nil {
		t.Fatal(err)
	}
	defer shut(link)
	a := &Agent{cfg: r.cfg}
	var got []string
	for _, addr := range a.serverAddresses() {
		got = append(got, addr.String())
	}
	if strings.Join(got, " ") != "127.0.0.1 192.0.2.1 fd00::1" {
		t.Errorf("%v", got)
	}
}
