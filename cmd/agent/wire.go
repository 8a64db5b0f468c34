package main

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/hex"
	"net/netip"
	"os"
	"time"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/access"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/certs"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/cgroupbpf"
	"github.com/kasway/kasway/pkg/intercept/iptables"
	"github.com/kasway/kasway/pkg/intercept/listen"
	"github.com/kasway/kasway/pkg/intercept/nft"
	"github.com/kasway/kasway/pkg/intercept/tproxy"
	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/tunnel"
)

// modeOrder is the order in which mode auto tries.
var modeOrder = []string{config.ModeEBPF, "nft", "iptables"}

// ebpfParts is what mode ebpf alone needs.
type ebpfParts struct {
	own     *intercept.OwnSockets
	metrics *cgroupbpf.Metrics
}

// modes makes the candidates of every mode by name; parts are nil where they
// are made only to look or to clean up.
func modes(cfg config.Intercept, parts *agent.Parts, of ebpfParts) map[string]intercept.Candidate {
	if parts == nil {
		parts = &agent.Parts{}
	}
	nftConfig := nft.Config{Log: parts.Log, Heartbeat: parts.Metrics}
	all := map[string]intercept.Candidate{
		config.ModeEBPF: {
			Name: config.ModeEBPF, Cleanup: cgroupbpf.Cleanup,
			New: func() (intercept.Mode, error) {
				return cgroupbpf.New(cgroupbpf.Config{
					Cgroup: cfg.Cgroup, Own: of.own, Log: parts.Log, Metrics: of.metrics, Heartbeat: parts.Metrics,
				}), nil
			},
		},
		"nft": {
			Name: "nft", Cleanup: nft.Cleanup,
			New: func() (intercept.Mode, error) { return nft.New(nftConfig), nil },
		},
		"iptables": {
			Name: "iptables", Cleanup: iptables.Cleanup,
			New: func() (intercept.Mode, error) {
				return iptables.New(iptables.Config{Log: parts.Log, Heartbeat: parts.Metrics}), nil
			},
		},
		// Its rules are the other two modes', and so is what removes them.
		config.ModeTPROXY: {Name: config.ModeTPROXY, Cleanup: tproxy.Cleanup, New: tproxyMode(cfg, parts, false)},
		config.ModeListen: {
			Name: config.ModeListen, // its guard is nft's, its address the agent's
			New: func() (intercept.Mode, error) {
				bind, err := netip.ParseAddr(cfg.BindAddress)
				if err != nil {
					return nil, err
				}
				return listen.New(listen.Config{
					Bind: []netip.Addr{bind}, Addresses: parts.Addresses, Listeners: parts.Listeners,
					Guard: func() (listen.Guard, error) {
						if r := nft.New(nftConfig).Preflight(context.Background()); r.Err != nil {
							return nil, r.Err
						}
						return nft.NewListenGuard(nftConfig), nil
					},
					Log: parts.Log, Metrics: parts.Metrics,
				}), nil
			},
		},
	}
	if cfg.Mode != config.ModeTPROXY || !tproxy.Hindered(cfg.Clients) {
		all[tproxyIPTables] = intercept.Candidate{Name: tproxyIPTables, New: tproxyMode(cfg, parts, true)}
	}
	return all
}

// tproxyIPTables is mode tproxy where nftables cannot do it.
const tproxyIPTables = config.ModeTPROXY + "-iptables"

func tproxyMode(cfg config.Intercept, parts *agent.Parts, byIPTables bool) func() (intercept.Mode, error) {
	return func() (intercept.Mode, error) {
		return tproxy.New(tproxy.Config{Clients: cfg.Clients, IPTables: byIPTables, Log: parts.Log, Heartbeat: parts.Metrics}), nil
	}
}

// everyMode is for cleaning up.
func everyMode() []intercept.Candidate {
	all := modes(config.Intercept{}, nil, ebpfParts{})
	return []intercept.Candidate{all[config.ModeEBPF], all["nft"], all["iptables"], all[config.ModeTPROXY]}
}

// candidates are those to try for a configured mode, and the others.
func candidates(mode string, all map[string]intercept.Candidate) (try, others []intercept.Candidate) {
	switch mode {
	case config.ModeAuto:
		for _, name := range modeOrder {
			try = append(try, all[name])
		}
		return try, []intercept.Candidate{all[config.ModeTPROXY]}
	case config.ModeTPROXY:
		// Whichever is not used, what is left of its kind of rules is removed, and
		// not the policy route of the one that is.
		byNFT := all[config.ModeTPROXY]
		byNFT.Cleanup = all["nft"].Cleanup
		try, others = append(try, byNFT), append(others, all[config.ModeEBPF])
		byIPTables, can := all[tproxyIPTables]
		if !can {
			return try, append(others, all["iptables"])
		}
		byIPTables.Cleanup = all["iptables"].Cleanup
		return append(try, byIPTables), others
	}
	for name, c := range all {
		// The guard of mode listen is one of nft's.
		if name != mode && (mode != config.ModeListen || name != "nft") {
			others = append(others, c)
		}
	}
	return []intercept.Candidate{all[mode]}, others
}

// wire puts the agent's parts together.
func wire(cfg config.Agent, log logrus.FieldLogger) (agent.Config, error) {
	reg := observe.NewRegistry("agent")
	tls, warnings, err := credentials(cfg)
	if err != nil {
		return agent.Config{}, err
	}
	for _, w := range warnings {
		log.Warn(w)
	}
	node := cfg.Identity.Name
	if node == "" {
		if node, err = os.Hostname(); err != nil {
			return agent.Config{}, err
		}
	}
	own := intercept.NewOwnSockets(intercept.Mark, intercept.Mark)
	links := tunnel.NewLinks(tunnel.LinksConfig{
		Servers: cfg.Links.Servers, TLS: tls, DialContext: own.DialContext, Node: node, Version: observe.Version,
		Log: log, Metrics: tunnel.NewLinksMetrics(reg),
	})
	guard, needWho, err := clientRules(cfg.Guard)
	if err != nil {
		return agent.Config{}, err
	}
	ebpf := ebpfParts{own, cgroupbpf.NewMetrics(reg)}
	return agent.Config{
		Agent: cfg, Generation: generation(), Links: linksView{links}, Own: own, NeedWho: needWho,
		Workloads: workloads(cfg.Intercept.Cgroup, log),
		Dial:      access.GuardClients(guard, log, access.NewAgentMetrics(reg), links.Dial),
		Modes: func(p agent.Parts) (try, others []intercept.Candidate) {
			return candidates(cfg.Intercept.Mode, modes(cfg.Intercept, &p, ebpf))
		},
		Registry: reg, Log: log,
	}, nil
}

// credentials loads what the agent proves itself with, and what is worth saying
// about it.
func credentials(cfg config.Agent) (*tls.Config, []string, error) {
	c, err := certs.Load(certs.Files{Certificate: cfg.Identity.Certificate, Key: cfg.Identity.Key, CA: cfg.Identity.CA})
	if err != nil {
		return nil, nil, err
	}
	t, err := c.Client()
	if err != nil {
		return nil, nil, err
	}
	t.ServerName = cfg.Links.ServerName
	return t, c.Warnings(time.Now()), nil
}

// generation tells this process's kernel objects from those of another.
func generation() string {
	var b [4]byte
	_, _ = rand.Read(b[:]) // never fails
	return hex.EncodeToString(b[:])
}

// clientRules is the guard as access wants it, and whether it asks who the
// host's clients are.
func clientRules(g config.Guard) (out []access.ClientRule, needWho bool, err error) {
	for _, r := range g.Rules {
		prefixes, err := access.ParsePrefixes(r.Prefixes)
		if err != nil {
			return nil, false, err
		}
		out = append(out, access.ClientRule{Allow: r.Allow, Prefixes: prefixes, UIDs: r.UIDs, Units: r.Units, Targets: r.Targets})
		needWho = needWho || len(r.UIDs)+len(r.Units) > 0
	}
	return out, needWho, nil
}

// linksView is the tunnel as the agent looks at it.
type linksView struct{ *tunnel.Links }

func (l linksView) Run(ctx context.Context) error { return l.Links.Run(ctx) }

func (l linksView) Carries(target string) bool { return l.Snapshot().Carries(target) }

func (l linksView) Status() []agent.LinkStatus {
	out := []agent.LinkStatus{}
	for _, s := range l.Snapshot().Links {
		out = append(out, agent.LinkStatus{
			Server: s.Server, State: s.State, Since: s.Since, RTT: s.RTT, Version: s.Version,
			Streams: s.Streams, LastError: s.LastError, Targets: s.Targets,
		})
	}
	return out
}
