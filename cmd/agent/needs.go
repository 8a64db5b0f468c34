package main

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"time"

	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
)

// serverTimeout bounds the handshake with one server.
const serverTimeout = 5 * time.Second

// whyCredentials is said of each of the three files.
const whyCredentials = "the agent proves to servers who it is by certificate and key, and knows them by the CA: without these no link is made"

// whyAny is said where nothing could be diverted.
const whyAny = "no connection reaches the agent without it"

// whyMode says what is lost with a mode.
var whyMode = map[string]string{
	config.ModeEBPF: "it diverts at connect(), before any address is translated, so that neither kube-proxy nor a CNI nor connection " +
		"tracking matters, and it knows who connects",
	config.ModeNFT:      "it diverts in a table of its own that ends with the agent, and needs no program but the agent",
	config.ModeIPTables: "it is what is left on nodes where neither ebpf nor nft can work",
	config.ModeTPROXY:   "it leaves the address of the KAS in the packets that reach the node",
	tproxyIPTables:      "it does what tproxy does where nftables cannot",
	config.ModeListen:   "clients are told the agent's address, and nothing is diverted",
}

// check answers every question, whatever the others' answers are.
func check(ctx context.Context, cfg config.Agent) []finding {
	found := []finding{{
		Need: "configuration", State: stateOK,
		Detail: count(len(cfg.Targets), "target") + ", " + count(len(cfg.Links.Servers), "server"),
	}}
	t, f := checkCredentials(cfg)
	found = append(found, f...)
	found = append(found, checkMark())
	found = append(found, checkAddresses(cfg.Intercept)...)
	modes, usable := checkModes(ctx, cfg.Intercept)
	found = append(found, modes...)
	found = append(found, checkPolicies(cfg, usable)...)
	found = append(found, checkConntrack(usable, os.ReadFile)...)
	for _, s := range cfg.Links.Servers {
		found = append(found, checkServer(ctx, s, t))
	}
	return found
}

// checkCredentials looks at each file, and at what is in them once all are
// there; the TLS settings are nil unless they can be used.
func checkCredentials(cfg config.Agent) (*tls.Config, []finding) {
	i := cfg.Identity
	found := []finding{
		checkFile("certificate", i.Certificate, config.Identity{Certificate: i.Certificate}),
		checkFile("key", i.Key, config.Identity{Key: i.Key}),
		checkFile("CA", i.CA, config.Identity{CA: i.CA}),
	}
	for _, f := range found {
		if f.State != stateOK {
			return nil, found
		}
	}
	t, warnings, err := credentials(cfg)
	if err != nil {
		return nil, append(found, finding{Need: "credentials", State: stateMissing, Detail: err.Error(), Why: whyCredentials})
	}
	if len(t.Certificates) > 0 {
		found[0].Detail += ": " + describe(t.Certificates[0].Leaf)
	}
	for _, w := range warnings {
		found = append(found, finding{Need: "credentials", State: stateWarning, Detail: w})
	}
	return t, found
}

// checkFile looks at one file of those that i names.
func checkFile(need, name string, i config.Identity) finding {
	f := finding{Need: need, State: stateOK, Detail: name}
	var wrong *config.Error
	if err := config.CheckCredentials(i); errors.As(err, &wrong) {
		f.State, f.Detail, f.Why = stateMissing, wrong.Problems[0].Text, whyCredentials
		f.Remedy = "for a trial `kasway-server certs` makes the files; else your own CA does"
	}
	return f
}

func describe(c *x509.Certificate) string {
	name := c.Subject.CommonName
	if len(c.URIs) > 0 {
		name = c.URIs[0].String()
	}
	return name + ", valid until " + c.NotAfter.UTC().Format(time.DateOnly)
}

func checkMark() finding {
	f := finding{Need: "mark of own sockets", State: stateOK, Detail: fmt.Sprintf("%#x", intercept.Mark)}
	if err := intercept.NewOwnSockets(intercept.Mark, intercept.Mark).Check(); err != nil {
		f.State, f.Detail, f.privilege = stateMissing, err.Error(), errors.Is(err, intercept.ErrPrivilege)
		f.Why = "it tells the agent's own connections from those of clients: without it they would be diverted to the agent itself"
	}
	return f
}

// checkAddresses looks whether those that the agent puts on lo are free, or
// its own already.
func checkAddresses(cfg config.Intercept) (found []finding) {
	addresses, err := agent.NodeAddresses(cfg)
	if err != nil {
		return []finding{{Need: "node addresses", State: stateMissing, Detail: err.Error()}}
	}
	for _, a := range addresses {
		f := finding{Need: "node address", State: stateOK, Detail: a.Addr.String()}
		if err := intercept.CheckNodeAddress(a); err != nil {
			f.State, f.Detail, f.Why = stateMissing, a.Addr.String()+": "+err.Error(), "connections of pods are diverted to it"
		}
		found = append(found, f)
	}
	return found
}

// checkModes asks every mode that may be chosen, and returns those that can
// work. The first of them is the one that would be used.
func checkModes(ctx context.Context, cfg config.Intercept) (found []finding, usable []string) {
	try, _ := candidates(cfg.Mode, modes(cfg, nil, ebpfParts{}))
	denied := 0
	for _, c := range try {
		f := checkMode(ctx, c)
		role := ""
		switch {
		case f.privilege:
			denied++
		case f.State == stateMissing:
		case len(usable) == 0:
			role = c.Name + " would be used"
		default:
			role = c.Name + " would be used if " + strings.Join(usable, " and ") + " failed"
		}
		if f.State != stateMissing {
			usable = append(usable, c.Name)
		}
		f.Detail = join(role, f.Detail)
		found = append(found, f)
	}
	if len(usable) == 0 && len(try) == 1 {
		found[0].Why = whyAny
		return found, nil
	}
	for i := range found {
		if found[i].State == stateMissing {
			found[i].State = stateUnused // another one can be, or the last row tells
		}
	}
	if len(usable) == 0 {
		found = append(found, finding{
			Need: "mode", State: stateMissing, Detail: "none of these can be used", privilege: denied == len(try),
			Why: whyAny, Remedy: "meet the needs of one of them, or choose another by intercept.mode",
		})
	}
	return found, usable
}

func join(parts ...string) string {
	var out []string
	for _, p := range parts {
		if p != "" {
			out = append(out, p)
		}
	}
	return strings.Join(out, "; ")
}

func checkMode(ctx context.Context, c intercept.Candidate) finding {
	f := finding{Need: "mode " + c.Name, State: stateOK}
	m, err := c.New()
	if err != nil {
		f.State, f.Detail, f.Why = stateMissing, err.Error(), whyMode[c.Name]
		return f
	}
	defer func() { _ = m.Close() }() // nothing was applied
	r := m.Preflight(ctx)
	switch {
	case r.Err == nil:
		f.Notes = r.Notes
		return f
	case errors.Is(r.Err, intercept.ErrNotSupported), errors.Is(r.Err, intercept.ErrPrivilege):
		f.State, f.privilege = stateMissing, errors.Is(r.Err, intercept.ErrPrivilege)
	default:
		f.State = stateUnknown
	}
	f.Detail, f.Why, f.Remedy, f.Notes = r.Err.Error(), whyMode[c.Name], r.Remedy, r.Notes
	return f
}

// checkServer makes a handshake as a link would; t is nil without credentials.
func checkServer(ctx context.Context, server string, t *tls.Config) finding {
	f := finding{Need: "server " + server, State: stateMissing, Why: "while no server can be reached connections are held, and then reset"}
	if t == nil {
		f.State, f.Detail, f.Why = stateUnknown, "not tried: the credentials come first", ""
		return f
	}
	ctx, cancel := context.WithTimeout(ctx, serverTimeout)
	defer cancel()
	t = t.Clone()
	t.NextProtos = []string{"h2"}
	if host, _, err := net.SplitHostPort(server); err == nil && t.ServerName == "" {
		t.ServerName = host
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Control: intercept.NewOwnSockets(intercept.Mark, intercept.Mark).Control}, Config: t}
	start := time.Now()
	c, err := d.DialContext(ctx, "tcp", server)
	if err != nil {
		f.Detail, f.privilege = err.Error(), errors.Is(err, intercept.ErrPrivilege)
		f.Remedy = "see that the server runs, that this node may reach its port, and that identity.ca is its CA"
		return f
	}
	defer func() { _ = c.Close() }()
	took := time.Since(start)
	// TLS 1.3 tells a client only with the first read that it was refused.
	_ = c.SetReadDeadline(time.Now().Add(serverTimeout))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		f.Detail = "it does not take our certificate: " + err.Error()
		f.Remedy = "see that the server's CA has issued the certificate, and that it has not expired"
		return f
	}
	f.State, f.Why, f.Detail = stateOK, "", fmt.Sprintf("handshake in %s", took.Round(time.Millisecond))
	return f
}
