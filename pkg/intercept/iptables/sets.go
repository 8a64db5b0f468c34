package iptables

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// sets talks to the kernel's ipset over one socket, which belongs to the
// network namespace that it was opened in.
type sets struct{ *netlink.Handle }

func openSets() (sets, error) {
	h, err := netlink.NewHandle(unix.NETLINK_NETFILTER)
	if err != nil {
		return sets{}, fmt.Errorf("opening netlink for ipset: %w", err)
	}
	return sets{h}, nil
}

// fill makes the set if it is missing, and renews its elements.
func (s sets) fill(set rules.IPSet) error {
	timeout := set.Timeout
	err := s.IpsetCreate(set.Name, "hash:net", netlink.IpsetCreateOptions{Replace: true, Timeout: &timeout, Family: family(set.V6)})
	if err != nil {
		return fmt.Errorf("creating ipset %s: %w", set.Name, err)
	}
	return s.renew(set)
}

// renew adds the elements again, which starts their timeouts anew.
func (s sets) renew(set rules.IPSet) error {
	for _, e := range set.Elements {
		entry := element(e)
		entry.Timeout, entry.Replace = &set.Timeout, true
		if err := s.IpsetAdd(set.Name, entry); err != nil {
			return fmt.Errorf("renewing %s in ipset %s: %w", e, set.Name, err)
		}
	}
	return nil
}

// element is a prefix as a set holds it, without a timeout.
func element(p netip.Prefix) *netlink.IPSetEntry {
	return &netlink.IPSetEntry{IP: p.Addr().AsSlice(), CIDR: uint8(p.Bits())}
}

func family(v6 bool) uint8 {
	if v6 {
		return unix.AF_INET6
	}
	return unix.AF_INET
}

// alive says whether somebody renews the set of this name.
func (s sets) alive(name string) (bool, error) {
	v6 := strings.HasPrefix(name, rules.IPSet6Prefix)
	for _, e := range rules.IPSetElements(v6) {
		in, err := s.IpsetTest(name, element(e))
		if err != nil && !errors.Is(err, unix.ENOENT) {
			return false, fmt.Errorf("testing %s in ipset %s: %w", e, name, err)
		}
		if in && err == nil {
			return true, nil
		}
	}
	return false, nil
}

// destroy removes a set that no rule refers to; one that is gone is no error.
func (s sets) destroy(name string) error {
	if err := s.IpsetDestroy(name); err != nil && !errors.Is(err, unix.ENOENT) {
		return fmt.Errorf("destroying ipset %s: %w", name, err)
	}
	return nil
}

// names lists the sets that are Kasway's. The library can list sets only with
// all their elements, which may be very many of somebody else's.
func (s sets) names() (own []string, err error) {
	const listNamesOnly = 1 << 1 // IPSET_FLAG_LIST_SETNAME
	req := nl.NewNetlinkRequest(nl.IPSET_CMD_LIST|unix.NFNL_SUBSYS_IPSET<<8, nl.GetIpsetFlags(nl.IPSET_CMD_LIST))
	req.AddData(&nl.Nfgenmsg{NfgenFamily: unix.AF_NETLINK, Version: nl.NFNETLINK_V0})
	req.AddData(nl.NewRtAttr(nl.IPSET_ATTR_PROTOCOL, nl.Uint8Attr(nl.IPSET_PROTOCOL)))
	req.AddData(&nl.Uint32Attribute{Type: nl.IPSET_ATTR_FLAGS | nl.NLA_F_NET_BYTEORDER, Value: listNamesOnly})
	messages, err := req.Execute(unix.NETLINK_NETFILTER, 0)
	if errors.Is(err, unix.EINVAL) {
		return nil, nil // this kernel has no ipset, or has not loaded it
	}
	if err != nil {
		return nil, fmt.Errorf("listing ipsets: %w", err)
	}
	for _, m := range messages {
		for a := range nl.ParseAttributes(m[nl.SizeofNfgenmsg:]) {
			if a.Type != nl.IPSET_ATTR_SETNAME {
				continue
			}
			if name := unix.ByteSliceToString(a.Value); setGeneration(name) != "" {
				own = append(own, name)
			}
		}
	}
	return own, nil
}

// setGeneration is the generation that a set of ours belongs to; "" for sets
// of others.
func setGeneration(name string) string {
	for _, prefix := range []string{rules.IPSet4Prefix, rules.IPSet6Prefix} {
		if g, ok := strings.CutPrefix(name, prefix); ok {
			return g
		}
	}
	return ""
}
