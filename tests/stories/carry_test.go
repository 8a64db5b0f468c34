package stories

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"time"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// The scenes that many tests share: both processes run, and a firewall lets
// nothing but the link pass.
var (
	nftScene      = &shared{build: carry(netns.NFTables, "nft")}
	iptablesScene = &shared{build: carry(netns.IptablesNFT, "iptables")}
	listenScene   = &shared{build: carryListening}
)

// everyScene is for stories that are the same in each mode.
var everyScene = []struct {
	mode  string
	scene *shared
	// raw are the addresses of the target "raw", as clients dial it.
	raw []netip.AddrPort
}{
	{"nft", nftScene, []netip.AddrPort{raw4, raw6}},
	{"iptables", iptablesScene, []netip.AddrPort{raw4, raw6}},
	{"listen", listenScene, []netip.AddrPort{netip.AddrPortFrom(bind, rawPort)}},
}

// carry builds a node with one kind of kube-proxy, which the mode shares the
// kernel with.
func carry(proxy netns.KubeProxy, mode string) func(*scene) error {
	return func(s *scene) (err error) {
		pods := []netip.Prefix{netip.MustParsePrefix("10.77.0.0/16"), netip.MustParsePrefix("fd00:77::/32")}
		err = s.Node.InstallKubeProxy(proxy,
			netns.Service{ClusterIP: svc4, Endpoint: kas4, Pods: pods[0]}, netns.Service{ClusterIP: svc6, Endpoint: kas6, Pods: pods[1]})
		if err != nil {
			return err
		}
		if s.before, err = s.Node.Snapshot(netns.Around{}); err != nil {
			return err
		}
		if err := s.cutOff(); err != nil {
			return err
		}
		if err := s.startServer(); err != nil {
			return err
		}
		s.agent, err = s.Agent(diverting(mode)...)
		return err
	}
}

// cutOff raises the firewall: what clients could reach before it, they cannot
// reach after, except the server's port.
func (s *scene) cutOff() (err error) {
	var probes []netns.Probe
	for _, h := range s.clients() {
		for _, to := range []netip.AddrPort{kas4, kas6, svc4, svc6} {
			probes = append(probes, netns.Probe{From: h, To: to})
		}
	}
	err = netns.CutOff(probes, 300*time.Millisecond, func() (err error) {
		s.firewall, err = s.ControlPlane.FirewallHere(stack.Port)
		return err
	})
	if err != nil {
		return err
	}
	// The other direction: nothing of the node is reached from over there.
	back, err := s.Node.Listen("tcp", netip.AddrPortFrom(s.Node.Addr4, 10250).String())
	if err != nil {
		return err
	}
	defer back.Close()
	if (netns.Probe{From: s.ControlPlane, To: netip.AddrPortFrom(s.Node.Addr4, 10250)}).Reach(300*time.Millisecond) == nil {
		return errors.New("the control plane reaches the node behind the firewall")
	}
	return nil
}

// What mode listen offers: the local port, and the address that it means.
var offers = []struct {
	local uint16
	name  string
	peer  netip.Addr // whom the KAS sees: the server, by the address that it dialled
}{
	{443, kas4.String(), kas4.Addr()},
	{6443, "localhost:6443", netip.MustParseAddr("127.0.0.1")},
	{7443, kas6.String(), kas6.Addr()},
	{8443, "kas.example.svc:6443", svc4.Addr()},
}

func carryListening(s *scene) (err error) {
	if err := s.cutOff(); err != nil {
		return err
	}
	// What the server's resolver knows, and the machine's does not.
	s.Hosts = s.Path("hosts")
	if err := os.WriteFile(s.Hosts, []byte(svc4.Addr().String()+" kas.example.svc\n"), 0o644); err != nil {
		return err
	}
	var allow []string
	flags := []string{"--mode", "listen", "--bind-address", bind.String(),
		"--target", fmt.Sprintf("%d:%s", rawPort, raw4), "--target", fmt.Sprintf("%d:%s", etcdPort, etcd)}
	for _, o := range offers {
		flags = append(flags, "--target", fmt.Sprintf("%d:%s", o.local, o.name))
		allow = append(allow, "--allowed-destination", o.name)
	}
	if s.server, err = s.Server(raw4.String(), allow...); err != nil {
		return err
	}
	s.agent, err = s.Agent(flags...)
	return err
}
