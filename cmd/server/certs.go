package main

import (
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/certs"
)

const authorityName = "Kasway CA"

func certsCommand() *cobra.Command {
	c := cli.Group(&cobra.Command{
		Use:   "certs",
		Short: "Make a CA and certificates for servers and agents",
		Long: `Makes a certificate authority in a directory, and with it certificates for
servers and agents. No file is replaced without --force; keys have mode 0600.`,
		Example: `  kasway-server certs init
  kasway-server certs server --dns kasway.example.com --ip 192.0.2.10
  kasway-server certs agent --name node1`,
	})
	c.AddCommand(certsInit(), certsServer(), certsAgent())
	return c
}

// certsFlags are those of every certs command.
type certsFlags struct {
	dir      string
	validity days
	force    bool
	out      cli.Output
}

func (f *certsFlags) register(c *cobra.Command, validity days) {
	f.validity = validity
	c.Flags().StringVarP(&f.dir, "dir", "d", "kasway-certs", "`directory` of the CA and of what it signs")
	c.Flags().Var(&f.validity, "validity", "how long the certificate is valid: 365d, 12h")
	c.Flags().BoolVar(&f.force, "force", false, "replace files that exist")
	f.out.Register(c)
}

// days is a flag of a duration that may be written in days.
type days time.Duration

const aDay = 24 * time.Hour

func (d *days) Set(s string) error {
	v, err := time.ParseDuration(s)
	if text, ok := strings.CutSuffix(s, "d"); ok {
		var n int
		n, err = strconv.Atoi(text)
		if v = time.Duration(n) * aDay; err == nil && n > maxDays {
			return fmt.Errorf("more than %d days", maxDays)
		}
	}
	switch {
	case err != nil:
		return errors.New("want days or a duration, such as 365d or 12h")
	case v <= 0:
		return errors.New("must be more than 0")
	}
	*d = days(v)
	return nil
}

// maxDays is a hundred years: a duration holds less than three hundred.
const maxDays = 36500

func (d *days) String() string {
	if v := time.Duration(*d); v%aDay == 0 {
		return strconv.Itoa(int(v/aDay)) + "d"
	}
	return time.Duration(*d).String()
}

func (d *days) Type() string { return "duration" }

// made is what a certs command tells.
type made struct {
	// Kept: it was there before, and was left alone.
	Kept bool `json:"kept"`
	// Kind is CA, server or agent.
	Kind        string    `json:"kind"`
	Identity    string    `json:"identity"`
	Certificate string    `json:"certificate"`
	Key         string    `json:"key"`
	CA          string    `json:"ca"`
	NotBefore   time.Time `json:"notBefore"`
	NotAfter    time.Time `json:"notAfter"`

	note string
	next string
}

func (f *certsFlags) print(c *cobra.Command, m made) error {
	return f.out.Print(c.OutOrStdout(), m, func(w io.Writer) {
		verb := "made"
		if m.Kept {
			verb = "kept"
		}
		_, _ = fmt.Fprintf(w, "%s the %s's certificate, %s, valid until %s\n", verb, m.Kind, m.Identity, m.NotAfter.UTC().Format(time.DateOnly))
		_, _ = fmt.Fprintf(w, "  %s\tthe certificate\n", m.Certificate)
		_, _ = fmt.Fprintf(w, "  %s\tits key; keep it secret\n", m.Key)
		if m.CA != m.Certificate {
			_, _ = fmt.Fprintf(w, "  %s\tthe CA that proves it\n", m.CA)
		}
		if m.note != "" {
			_, _ = fmt.Fprintln(w, m.note)
		}
		_, _ = fmt.Fprintf(w, "next: %s\n", m.next)
	})
}

func certsInit() *cobra.Command {
	var f certsFlags
	c := &cobra.Command{
		Use:   "init",
		Short: "Make the CA, unless there is one",
		Long: `Makes the CA: a certificate that servers and agents are proven with, and the key
that signs theirs. A CA that exists is kept.`,
		Args: cli.NoArgs,
	}
	f.register(c, days(3650*aDay))
	c.RunE = func(c *cobra.Command, _ []string) error { return exit(f.init(c)) }
	return c
}

func (f *certsFlags) init(c *cobra.Command) error {
	m := made{
		Kind: "CA", Identity: authorityName, Certificate: filepath.Join(f.dir, certs.CACertificate), Key: filepath.Join(f.dir, certs.CAKey),
		next: fmt.Sprintf("%s certs server --dir %s --dns HOST (or --ip ADDRESS)", binary, f.dir),
	}
	m.CA = m.Certificate
	existing, err := certs.LoadAuthority(f.dir)
	if err == nil && !f.force {
		m.Kept, m.NotBefore, m.NotAfter = true, existing.Certificate.NotBefore, existing.Certificate.NotAfter
		return f.print(c, m)
	}
	if err != nil && !f.force && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("the CA in %s cannot be used: %w", f.dir, err)
	}
	if err == nil {
		m.note = "the CA before is replaced: nobody trusts its certificates from now on, make them anew"
	}
	a, err := certs.NewAuthority(authorityName, time.Duration(f.validity))
	if err != nil {
		return err
	}
	if _, _, err := certs.Save(f.dir, "ca", a.Pair, f.force); err != nil {
		return remedy(err)
	}
	m.NotBefore, m.NotAfter = a.Certificate.NotBefore, a.Certificate.NotAfter
	return f.print(c, m)
}

func certsServer() *cobra.Command {
	var (
		f   certsFlags
		dns []string
		ips []string
	)
	c := &cobra.Command{
		Use:   "server",
		Short: "Make a server's certificate",
		Long: `Makes a certificate that proves a server to agents. They know it by the names and
addresses given here: what their --server says must be among them.`,
		Example: `  kasway-server certs server --dns kasway.example.com --ip 192.0.2.10`,
		Args:    cli.NoArgs,
	}
	c.Flags().StringSliceVar(&dns, "dns", nil, "DNS `name` of the server; repeatable")
	c.Flags().StringSliceVar(&ips, "ip", nil, "IP `address` of the server; repeatable")
	f.register(c, days(365*aDay))
	c.RunE = func(c *cobra.Command, _ []string) error {
		r := certs.ServerRequest{DNS: dns, Validity: time.Duration(f.validity)}
		for _, s := range ips {
			ip, err := netip.ParseAddr(s)
			if err != nil || ip.Zone() != "" {
				return cli.UsageErrorf("--ip %q: not an IP address", s)
			}
			r.IPs = append(r.IPs, ip)
		}
		if len(dns)+len(ips) == 0 {
			return cli.UsageErrorf("--dns or --ip is required: the names under which agents know the server\nSee '%s --help'", c.CommandPath())
		}
		return exit(f.issue(c, "server", made{Kind: "server", Identity: strings.Join(append(dns, ips...), ", ")},
			func(a *certs.Authority) (certs.Pair, error) { return a.IssueServer(r) },
			func(m made) string {
				return fmt.Sprintf("%s run --cert %s --key %s --ca %s --allowed-destination HOST:PORT", binary, m.Certificate, m.Key, m.CA)
			}))
	}
	return c
}

// defaultTrustDomain is the one that the manifests in deploy/ grant.
const defaultTrustDomain = "kasway"

func certsAgent() *cobra.Command {
	var (
		f      certsFlags
		name   string
		domain string
		groups []string
	)
	c := &cobra.Command{
		Use:   "agent",
		Short: "Make an agent's certificate",
		Long: `Makes a certificate that proves an agent to servers, as
spiffe://<trust domain>/agent/<name>. The server's policy grants by that, by the
name alone, or by group.`,
		Example: `  kasway-server certs agent --name node1`,
		Args:    cli.NoArgs,
	}
	c.Flags().StringVar(&name, "name", "", "the agent's `name`, such as its node's (required)")
	c.Flags().StringVar(&domain, "trust-domain", defaultTrustDomain, "trust `domain` of the SPIFFE ID; empty: no ID, the name alone")
	c.Flags().StringSliceVar(&groups, "group", nil, "`group` of the agent, for grants to group:NAME; repeatable")
	f.register(c, days(365*aDay))
	c.RunE = func(c *cobra.Command, _ []string) error {
		if name == "" {
			return cli.UsageErrorf("--name is required: which agent the certificate is for\nSee '%s --help'", c.CommandPath())
		}
		if strings.ContainsAny(name, "/\x00") {
			return cli.UsageErrorf("--name %q: a name has no slash", name)
		}
		r := certs.AgentRequest{Name: name, TrustDomain: domain, Groups: groups, Validity: time.Duration(f.validity)}
		identity := name
		if domain != "" {
			identity = "spiffe://" + domain + "/agent/" + name
		}
		return exit(f.issue(c, "agent-"+name, made{Kind: "agent", Identity: identity},
			func(a *certs.Authority) (certs.Pair, error) { return a.IssueAgent(r) },
			func(m made) string {
				return fmt.Sprintf("copy the three files to the node; there: kasway-agent run --server HOST:8091 --cert %s --key %s --ca %s",
					filepath.Base(m.Certificate), filepath.Base(m.Key), filepath.Base(m.CA))
			}))
	}
	return c
}

// issue makes one certificate, saves and tells it.
func (f *certsFlags) issue(c *cobra.Command, file string, m made, sign func(*certs.Authority) (certs.Pair, error), next func(made) string) error {
	a, err := certs.LoadAuthority(f.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no CA in %s; make it first: %s certs init --dir %s", f.dir, binary, f.dir)
	}
	if err != nil {
		return fmt.Errorf("the CA in %s cannot be used: %w", f.dir, err)
	}
	p, err := sign(a)
	if err != nil {
		return cli.UsageErrorf("%w", err)
	}
	m.CA = filepath.Join(f.dir, certs.CACertificate)
	m.NotBefore, m.NotAfter = p.Certificate.NotBefore, p.Certificate.NotAfter
	if m.Certificate, m.Key, err = certs.Save(f.dir, file, p, f.force); err != nil {
		return remedy(err)
	}
	if asked := time.Duration(f.validity); time.Until(m.NotAfter) < asked-time.Hour {
		m.note = "its end is the CA's own, which is sooner than asked for"
	}
	m.next = next(m)
	return f.print(c, m)
}

func remedy(err error) error {
	if errors.Is(err, certs.ErrExists) {
		return fmt.Errorf("%w; --force replaces it", err)
	}
	return err
}
