package main

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
)

// finding is the answer to one question of check.
type finding struct {
	Need   string `json:"need"`
	State  string `json:"state"` // ok, missing, unknown or info
	Detail string `json:"detail,omitempty"`
	Remedy string `json:"remedy,omitempty"`

	privilege bool
}

// States of a finding. Only stateMissing fails the check.
const (
	stateOK      = "ok"
	stateMissing = "missing"
	stateUnknown = "unknown"
	stateInfo    = "info"
)

// serverTimeout bounds the handshake with one server.
const serverTimeout = 5 * time.Second

func checkCommand() *cobra.Command {
	var out cli.Output
	c := &cobra.Command{
		Use:   "check",
		Short: "Tell what an agent needs here, and how to get what is missing",
		Long: `Looks at the configuration, the credentials, this node's kernel and the way to the
servers, and changes nothing. Exit code 0: an agent would work; 1: something is
missing; 2: the configuration is wrong; 77: this process may not even look.`,
		Args: cli.NoArgs,
	}
	flags := config.AgentFlags(c.Flags())
	out.Register(c)
	c.RunE = func(c *cobra.Command, _ []string) error {
		cfg, err := config.LoadAgent(flags)
		if err != nil {
			return err
		}
		found := check(c.Context(), cfg)
		if err := out.Print(c.OutOrStdout(), found, func(w io.Writer) { printFindings(w, found) }); err != nil {
			return err
		}
		return verdict(found)
	}
	return c
}

// check answers every question, whatever the others' answers are.
func check(ctx context.Context, cfg config.Agent) []finding {
	found := []finding{{Need: "configuration", State: stateOK, Detail: fmt.Sprintf("%d targets, %d servers", len(cfg.Targets), len(cfg.Links.Servers))}}
	t, f := checkCredentials(cfg)
	found = append(found, f...)
	found = append(found, checkMark())
	found = append(found, checkModes(ctx, cfg.Intercept)...)
	if t != nil {
		for _, s := range cfg.Links.Servers {
			found = append(found, checkServer(ctx, s, t))
		}
	}
	return found
}

func checkCredentials(cfg config.Agent) (*tls.Config, []finding) {
	if err := config.CheckCredentials(cfg.Identity); err != nil {
		return nil, []finding{{Need: "credentials", State: stateMissing, Detail: err.Error()}}
	}
	t, warnings, err := credentials(cfg)
	if err != nil {
		return nil, []finding{{Need: "credentials", State: stateMissing, Detail: err.Error()}}
	}
	found := []finding{{Need: "credentials", State: stateOK, Detail: cfg.Identity.Certificate}}
	for _, w := range warnings {
		found = append(found, finding{Need: "credentials", State: stateInfo, Detail: w})
	}
	return t, found
}

func checkMark() finding {
	f := finding{Need: "mark of own sockets", State: stateOK}
	if err := intercept.NewOwnSockets(agent.Mark, agent.Mark).Check(); err != nil {
		f.State, f.Detail, f.privilege = stateMissing, err.Error(), errors.Is(err, intercept.ErrPrivilege)
	}
	return f
}

// checkModes asks every mode. The one that would be used must work; of mode
// auto, any.
func checkModes(ctx context.Context, cfg config.Intercept) []finding {
	var found []finding
	try, _ := candidates(cfg.Mode, modes(cfg, nil, nil, nil))
	usable, denied := "", 0
	for _, c := range try {
		f := checkMode(ctx, c)
		if f.State != stateMissing && usable == "" {
			usable = c.Name
		}
		if f.privilege {
			denied++
		}
		found = append(found, f)
	}
	for i := range found {
		// Without it another one does.
		if usable != "" && found[i].State == stateMissing {
			found[i].State = stateInfo
		}
	}
	use := finding{Need: "mode", State: stateOK, Detail: fmt.Sprintf("%s would be used", usable)}
	if usable == "" {
		use = finding{Need: "mode", State: stateMissing, Detail: "none can be used here", privilege: denied == len(try)}
	}
	return append(found, use)
}

func checkMode(ctx context.Context, c intercept.Candidate) finding {
	f := finding{Need: "mode " + c.Name, State: stateOK}
	m, err := c.New()
	if err != nil {
		f.State, f.Detail = stateMissing, err.Error()
		return f
	}
	defer func() { _ = m.Close() }() // nothing was applied
	r := m.Preflight(ctx)
	f.Remedy = r.Remedy
	switch {
	case r.Err == nil:
		f.Detail = strings.Join(r.Notes, "; ")
	case errors.Is(r.Err, intercept.ErrNotSupported), errors.Is(r.Err, intercept.ErrPrivilege):
		f.State, f.Detail, f.privilege = stateMissing, r.Err.Error(), errors.Is(r.Err, intercept.ErrPrivilege)
	default:
		f.State, f.Detail = stateUnknown, r.Err.Error()
	}
	return f
}

// checkServer makes a handshake as a link would.
func checkServer(ctx context.Context, server string, t *tls.Config) finding {
	f := finding{Need: "server " + server, State: stateMissing}
	ctx, cancel := context.WithTimeout(ctx, serverTimeout)
	defer cancel()
	t = t.Clone()
	t.NextProtos = []string{"h2"}
	if host, _, err := net.SplitHostPort(server); err == nil && t.ServerName == "" {
		t.ServerName = host
	}
	d := tls.Dialer{NetDialer: &net.Dialer{Control: intercept.NewOwnSockets(agent.Mark, agent.Mark).Control}, Config: t}
	start := time.Now()
	c, err := d.DialContext(ctx, "tcp", server)
	if err != nil {
		f.Detail, f.Remedy = err.Error(), "see that the server runs, that this node may reach its port, and that ca names its CA"
		return f
	}
	defer c.Close()
	// TLS 1.3 tells a client only with the first read that it was refused.
	_ = c.SetReadDeadline(time.Now().Add(serverTimeout))
	if _, err := c.Read(make([]byte, 1)); err != nil {
		f.Detail, f.Remedy = "it refuses our certificate: "+err.Error(), "see that the server's CA has issued it and that it has not expired"
		return f
	}
	f.State, f.Detail = stateOK, fmt.Sprintf("handshake in %s", time.Since(start).Round(time.Millisecond))
	return f
}

func printFindings(w io.Writer, found []finding) {
	fmt.Fprintln(w, "NEED\tSTATE\tDETAIL")
	for _, f := range found {
		detail := strings.ReplaceAll(f.Detail, "\n", "; ")
		fmt.Fprintf(w, "%s\t%s\t%s\n", f.Need, f.State, orNone(detail))
		if f.Remedy != "" && f.State != stateOK {
			fmt.Fprintf(w, "\t\tremedy: %s\n", f.Remedy)
		}
	}
}

func verdict(found []finding) error {
	missing, denied := 0, 0
	for _, f := range found {
		if f.State == stateMissing {
			missing++
			if f.privilege {
				denied++
			}
		}
	}
	switch {
	case missing == 0:
		return nil
	case denied > 0:
		return fmt.Errorf("%d needs are not met: %w", missing, intercept.ErrPrivilege)
	}
	return fmt.Errorf("%d needs are not met", missing)
}
