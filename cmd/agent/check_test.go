package main

import (
	"crypto/tls"
	"encoding/json"
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/tests/netns"
)

var loopback = []netip.Addr{netip.MustParseAddr("127.0.0.1")}

// withoutModes leaves out what depends on the kernel.
func withoutModes(table string) (rest, modes string) {
	for line := range strings.Lines(table) {
		switch {
		case strings.HasPrefix(line, "mode "):
			modes += line
		case !strings.HasPrefix(line, "connection tracking "):
			rest += line
		}
	}
	return rest, modes
}

func TestCheckWithoutCredentials(t *testing.T) {
	netns.Require(t)
	args := []string{"check", "-f", example, "--cert", "/nowhere/agent.crt", "--key", "/nowhere/agent.key", "--ca", "/nowhere/ca.crt", "--mode", "nft"}
	code, out, errs := command(t, args...)
	if code != cli.Failed || errs != "kasway-agent: missing: certificate, key, CA\n" {
		t.Errorf("exit %d: %s", code, errs)
	}
	rest, modes := withoutModes(out)
	golden(t, "check", rest)
	if !strings.Contains(modes, "nft would be used") {
		t.Errorf("modes: %s", modes)
	}
	code, out, _ = command(t, append(args, "-o", "json")...)
	var found []finding
	if err := json.Unmarshal([]byte(out), &found); err != nil || code != cli.Failed {
		t.Fatalf("exit %d, %v: %s", code, err, out)
	}
	missing := map[string]string{}
	for _, f := range found {
		if f.State == stateMissing {
			missing[f.Need] = f.Detail
		}
	}
	if len(missing) != 3 || !strings.Contains(missing["key"], "/nowhere/agent.key") || !strings.Contains(missing["CA"], "/nowhere/ca.crt") {
		t.Errorf("missing: %v", missing)
	}
}

// tlsServer makes handshakes and says hello, until the test ends.
func tlsServer(t *testing.T, config *tls.Config) (address string) {
	t.Helper()
	config.NextProtos = []string{"h2"}
	l, err := tls.Listen("tcp", "127.0.0.1:0", config)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = c.Write([]byte("hello")) // fails where the handshake does
			_, _ = c.Read(make([]byte, 1))
			_ = c.Close()
		}
	})
	t.Cleanup(func() { _ = l.Close(); wg.Wait() })
	return l.Addr().String()
}

func serverTLS(t *testing.T, dir string) *tls.Config {
	t.Helper()
	c, err := certs.Load(certs.Files{
		Certificate: filepath.Join(dir, "server.crt"), Key: filepath.Join(dir, "server.key"), CA: filepath.Join(dir, "ca.crt"),
	})
	if err != nil {
		t.Fatal(err)
	}
	config, err := c.Server()
	if err != nil {
		t.Fatal(err)
	}
	return config
}

func checkArgs(dir, server string) []string {
	return append(identity(dir), "--target", "kas=10.96.0.1:443", "--clients", "host,pods", "--server", server,
		"--mode", "nft", "--state-dir", filepath.Join(dir, "state"))
}

func run(t *testing.T, args []string) (code int, found map[string]finding) {
	t.Helper()
	code, out, _ := command(t, append([]string{"check", "-o", "json"}, args...)...)
	var list []finding
	if err := json.Unmarshal([]byte(out), &list); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	found = map[string]finding{}
	for _, f := range list {
		found[f.Need] = f
	}
	return code, found
}

func TestCheckServers(t *testing.T) {
	netns.Require(t)
	dir, others := pki(t), pki(t)
	good := tlsServer(t, serverTLS(t, dir))
	ok(t, append([]string{"check"}, checkArgs(dir, good)...)...)
	if _, err := os.Stat(filepath.Join(dir, "state")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the check made the state directory: %v", err)
	}

	stranger := tlsServer(t, serverTLS(t, others))
	// It proves itself as ours does, but lets in only agents of another CA.
	choosy := serverTLS(t, dir)
	choosy.ClientCAs = serverTLS(t, others).ClientCAs
	for server, says := range map[string]string{
		stranger:             "certificate signed by unknown authority",
		tlsServer(t, choosy): "it does not take our certificate",
		"127.0.0.1:1":        "connection refused",
	} {
		code, found := run(t, checkArgs(dir, server))
		f := found["server "+server]
		if code != cli.Failed || f.State != stateMissing || !strings.Contains(f.Detail, says) || f.Remedy == "" {
			t.Errorf("exit %d, %+v, want it to say %q", code, f, says)
		}
	}
	_, found := run(t, checkArgs(dir, good))
	if d := found["certificate"].Detail; !strings.Contains(d, "agent.crt: spiffe://kasway/agent/node1, valid until 2") {
		t.Errorf("certificate: %s", d)
	}
}

// Whether an expired certificate is refused is the other side's affair: here it
// is a warning.
func TestCheckExpiredCertificate(t *testing.T) {
	netns.Require(t)
	dir := pki(t)
	a, err := certs.LoadAuthority(dir)
	if err != nil {
		t.Fatal(err)
	}
	p, err := a.IssueAgent(certs.AgentRequest{Name: "node1", Validity: time.Nanosecond})
	if err == nil {
		_, _, err = certs.Save(dir, "agent", p, true)
	}
	if err != nil {
		t.Fatal(err)
	}
	server := tlsServer(t, serverTLS(t, dir))
	_, found := run(t, checkArgs(dir, server))
	if f := found["credentials"]; f.State != stateWarning || !strings.Contains(f.Detail, "expired on") {
		t.Errorf("%+v", f)
	}
	if f := found["server "+server]; f.State != stateMissing || !strings.Contains(f.Detail, "it does not take our certificate") {
		t.Errorf("%+v", f)
	}
}

func TestCheckCredentialsThatDoNotFit(t *testing.T) {
	netns.Require(t)
	dir := pki(t)
	args := append(checkArgs(dir, "127.0.0.1:1"), "--key", filepath.Join(dir, "server.key"))
	code, found := run(t, args)
	if code != cli.Failed || found["credentials"].State != stateMissing || found["server 127.0.0.1:1"].State != stateUnknown {
		t.Errorf("exit %d: %+v", code, found)
	}
	if err := os.Chmod(filepath.Join(dir, "agent.key"), 0o644); err != nil {
		t.Fatal(err)
	}
	if _, found := run(t, checkArgs(dir, "127.0.0.1:1")); found["key"].State != stateMissing || found["certificate"].State != stateOK {
		t.Errorf("a key that everybody can read: %+v", found)
	}
}

func TestCheckNodeAddress(t *testing.T) {
	netns.Require(t)
	dir := pki(t)
	args := checkArgs(dir, tlsServer(t, serverTLS(t, dir)))
	link := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth9"}, PeerName: "far9"}
	if err := netlink.LinkAdd(link); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = netlink.LinkDel(link) })
	a, err := netlink.ParseAddr("169.254.77.1/32")
	if err != nil {
		t.Fatal(err)
	}
	if err := netlink.AddrAdd(link, a); err != nil {
		t.Fatal(err)
	}
	code, found := run(t, args)
	f := found["node address"]
	if code != cli.Failed || f.State != stateMissing || !strings.Contains(f.Detail, "169.254.77.1: eth9 has it already: choose another intercept.nodeAddresses.ipv4") {
		t.Errorf("exit %d, %+v", code, f)
	}
	ok(t, append([]string{"check"}, append(args, "--node-ipv4", "169.254.77.5")...)...)
}

// The first mode that can work is the one that would be used, and what others
// lack is then no need.
func TestCheckModesVerdict(t *testing.T) {
	for name, c := range map[string]struct {
		found []finding
		want  int
	}{
		"all is well":       {[]finding{{State: stateOK}, {State: stateUnused}, {State: stateUnknown}, {State: stateWarning}}, cli.OK},
		"one is missing":    {[]finding{{State: stateOK}, {Need: "x", State: stateMissing}}, cli.Failed},
		"a privilege is":    {[]finding{{Need: "x", State: stateMissing}, {Need: "y", State: stateMissing, privilege: true}}, cli.Privilege},
		"one that is spare": {[]finding{{State: stateUnused, privilege: true}}, cli.OK},
	} {
		err := verdict(c.found)
		got := cli.OK
		switch {
		case errors.Is(err, intercept.ErrPrivilege):
			got = cli.Privilege
		case err != nil:
			got = cli.Failed
		}
		if got != c.want {
			t.Errorf("%s: exit %d (%v), want %d", name, got, err, c.want)
		}
	}
}

func TestPrintFindings(t *testing.T) {
	var b strings.Builder
	printFindings(&b, []finding{
		{Need: "a", State: stateMissing, Detail: "one\ntwo", Remedy: "same"},
		{Need: "b", State: stateMissing, Remedy: "same"},
		{Need: "c", State: stateOK, Notes: []string{"first", "second"}},
		{Need: "d", State: stateMissing, Detail: "missing privilege: x", Why: "because", Remedy: "do"},
		{Need: "e", State: stateUnused, Detail: "missing privilege: y", Why: "because", Remedy: "do it"},
	})
	want := "NEED\tSTATE\tDETAIL\na\tmissing\tone; two\nb\tmissing\t-\n\t\tremedy: same\n" +
		"c\tok\t-\n\t\tnote: first\n\t\tnote: second\n" +
		"d\tmissing\tx\n\t\tremedy: do\n" +
		"e\tunused\tmissing privilege: y\n\t\twhy: because\n\t\tremedy: do it\n"
	if b.String() != want {
		t.Errorf("%q, want %q", b.String(), want)
	}
}

// The last line says each thing once, privileges first: they decide the exit code.
func TestCheckVerdictText(t *testing.T) {
	for want, found := range map[string][]finding{
		"missing: a, b":                               {{Need: "a", State: stateMissing}, {Need: "b", State: stateMissing}},
		"missing privilege: a":                        {{Need: "a", State: stateMissing, privilege: true}, {Need: "b", State: stateUnused, privilege: true}},
		"missing privilege: b; missing as well: a, c": {{Need: "a", State: stateMissing}, {Need: "b", State: stateMissing, privilege: true}, {Need: "c", State: stateMissing}},
	} {
		if err := verdict(found); err == nil || err.Error() != want {
			t.Errorf("%v, want %q", err, want)
		}
	}
}

// What the kernel answers of a mode is translated, and the mode that would be
// used comes first.
func TestCheckAutoTellsWhichMode(t *testing.T) {
	netns.Require(t)
	dir := pki(t)
	args := append(checkArgs(dir, tlsServer(t, serverTLS(t, dir))), "--mode", "auto")
	_, found := run(t, args)
	used := 0
	for _, name := range modeOrder {
		f, ok := found["mode "+name]
		if !ok {
			t.Errorf("mode %s is not looked at", name)
		}
		if strings.HasPrefix(f.Detail, name+" would be used") && !strings.Contains(f.Detail, " failed") {
			used++
		}
	}
	if used != 1 {
		t.Errorf("%d modes would be used: %+v", used, found)
	}
}
