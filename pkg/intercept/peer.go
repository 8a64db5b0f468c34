package intercept

import (
	"errors"
	"fmt"
	"net/netip"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

// Answers about a peer are kept this long, and never more of them than this: a
// pod that opens many connections asks the kernel once a second.
const (
	peerTTL      = time.Second
	maxPeerCache = 4096
)

// PeersConfig is what Peers needs.
type PeersConfig struct {
	// Uplinks names the interfaces that lead to other hosts; empty: they are
	// found out from links and routes, as they are besides while one of those
	// named is not there.
	Uplinks []string
	// Servers are the addresses that links go to, the way to which is an
	// uplink too; nil: none. It is called again and again, from any goroutine.
	Servers func() []netip.Addr
	// Own tells our own connections; nil: none.
	Own *OwnSockets
}

// Peers keeps strangers out. An address that only lo has does not stop a
// neighbour on the network, who may address packets to it, nor does a loopback
// address where kube-proxy has set route_localnet; so each peer is looked up.
// It is safe for concurrent use.
type Peers struct {
	nl      *netlink.Handle
	own     *OwnSockets
	uplinks *uplinks

	mu    sync.Mutex
	cache map[netip.Addr]answer
}

// answer is what is known about one address until it expires.
type answer struct {
	host    bool  // it is this host's own
	foreign error // why it is not of this node; nil: it is
	until   time.Time
}

// NewPeers looks at the network namespace of the calling thread. Close it when
// nobody accepts any more.
func NewPeers(cfg PeersConfig) (*Peers, error) {
	nl, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, fmt.Errorf("opening netlink to look up peers: %w", err)
	}
	return &Peers{
		nl: nl, own: cfg.Own, cache: map[netip.Addr]answer{},
		uplinks: &uplinks{nl: nl, configured: cfg.Uplinks, servers: cfg.Servers},
	}, nil
}

// Close gives back what NewPeers opened.
func (p *Peers) Close() { p.nl.Close() }

// Admit fills in Taken.FromHost, and refuses with ErrStranger a peer that is
// not of this node and with ErrOwn one that is this agent. What cannot be found
// out is refused. It is for ServerConfig.Admit.
func (p *Peers) Admit(t *Taken) error {
	a := p.ask(t.Peer.Addr())
	t.FromHost = a.host
	switch {
	case a.foreign != nil:
		return fmt.Errorf("%w: %s: %w", ErrStranger, t.Peer.Addr(), a.foreign)
	case a.host && p.own != nil && p.own.Has(t.Peer):
		return fmt.Errorf("%w: the kernel diverts what carries our mark, or something has removed the mark", ErrOwn)
	case t.Side == HostSide && !a.host:
		return fmt.Errorf("%w: %s is none of this host's addresses, and this listener serves the host alone", ErrStranger, t.Peer.Addr())
	}
	return nil
}

func (p *Peers) ask(addr netip.Addr) answer {
	now := time.Now()
	p.mu.Lock()
	defer p.mu.Unlock()
	if a, ok := p.cache[addr]; ok && now.Before(a.until) {
		return a
	}
	a := p.lookUp(addr)
	a.until = now.Add(peerTTL)
	if len(p.cache) >= maxPeerCache {
		clear(p.cache)
	}
	p.cache[addr] = a
	return a
}

// lookUp asks the kernel which way leads back to addr. The handshake is done by
// then, so whoever is at the end of that way is the peer.
func (p *Peers) lookUp(addr netip.Addr) answer {
	routes, err := p.nl.RouteGetWithOptions(addr.WithZone("").AsSlice(), &netlink.RouteGetOptions{Oif: addr.Zone()})
	if err != nil || len(routes) == 0 {
		return answer{foreign: fmt.Errorf("looking up the route to it: %w", err)}
	}
	r := routes[0]
	if r.Type == unix.RTN_LOCAL {
		return answer{host: true}
	}
	if r.Type != unix.RTN_UNICAST {
		return answer{foreign: errors.New("no unicast route leads to it")}
	}
	name, uplink, err := p.uplinks.has(r.LinkIndex)
	if err != nil {
		return answer{foreign: err}
	}
	if uplink {
		return answer{foreign: fmt.Errorf("it is reached by %s, which leads to other hosts; if it leads to pods, name the true uplinks in intercept.uplinks", name)}
	}
	return answer{}
}
