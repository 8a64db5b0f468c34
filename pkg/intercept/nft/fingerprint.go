package nft

import (
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// fingerprint is what the kernel holds of one table, as far as somebody can
// change it: the bytes of attributes, without handles and counters.
type fingerprint struct {
	there  bool
	flags  string
	chains map[string]string
	rules  map[string][]string
	sets   []string
}

const chainFlags = 10 // NFTA_CHAIN_FLAGS

// dumpTries is how often an answer is asked for that a change of somebody's
// tables has interrupted.
const dumpTries = 10

var errInterrupted = errors.New("nftables: somebody changes tables all the time")

// dump asks for all objects of one kind, and again if the answer may be half of
// one state and half of another.
func (s *socket) dump(what string, get, kind uint16, family byte, attrs ...netlink.Attribute) ([]netlink.Message, error) {
	var b batch
	data := b.encode(attrs)
	if b.err != nil {
		return nil, b.err
	}
	for range dumpTries {
		_, replies, err := s.exchange([]netlink.Message{message(get, family, netlink.Dump, data)})
		if err != nil {
			return nil, err
		}
		var found []netlink.Message
		whole := true
		for _, r := range replies {
			if err := answer(r); err != nil {
				return nil, fmt.Errorf("nftables: listing %s: %w", what, err)
			}
			whole = whole && r.Header.Flags&unix.NLM_F_DUMP_INTR == 0
			if r.Header.Type == netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8|kind) && len(r.Data) >= 4 {
				found = append(found, r)
			}
		}
		if whole {
			return found, nil
		}
	}
	return nil, fmt.Errorf("listing %s: %w", what, errInterrupted)
}

// attributes are those of a reply, by type.
func attributes(r netlink.Message) (map[uint16][]byte, error) {
	list, err := netlink.UnmarshalAttributes(r.Data[4:])
	if err != nil {
		return nil, fmt.Errorf("nftables: reading an answer: %w", err)
	}
	all := map[uint16][]byte{}
	for _, a := range list {
		all[a.Type&^(unix.NLA_F_NESTED|unix.NLA_F_NET_BYTEORDER)] = a.Data
	}
	return all, nil
}

func str(data []byte) string { return unix.ByteSliceToString(data) }

// baseChain is a chain that the kernel has, of any table.
type baseChain struct {
	family         byte
	table, name    string
	kind           string // "nat", "filter"; "" if it has no hook
	hook, priority int
	bytes          string // hook, type, policy and flags
}

// chains lists the chains of all tables.
func (s *socket) chains() ([]baseChain, error) {
	replies, err := s.dump("chains", unix.NFT_MSG_GETCHAIN, unix.NFT_MSG_NEWCHAIN, unix.AF_UNSPEC)
	if err != nil {
		return nil, err
	}
	var all []baseChain
	for _, r := range replies {
		attrs, err := attributes(r)
		if err != nil {
			return nil, err
		}
		c := baseChain{family: r.Data[0], table: str(attrs[unix.NFTA_CHAIN_TABLE]), name: str(attrs[unix.NFTA_CHAIN_NAME]), kind: str(attrs[unix.NFTA_CHAIN_TYPE])}
		c.bytes = fmt.Sprintf("%x %x %x %x", attrs[unix.NFTA_CHAIN_HOOK], attrs[unix.NFTA_CHAIN_TYPE], attrs[unix.NFTA_CHAIN_POLICY], attrs[chainFlags])
		if hook := attrs[unix.NFTA_CHAIN_HOOK]; hook != nil {
			list, err := netlink.UnmarshalAttributes(hook)
			if err != nil {
				return nil, fmt.Errorf("nftables: reading the hook of chain %s: %w", c.name, err)
			}
			for _, a := range list {
				switch {
				case len(a.Data) != 4:
				case a.Type == unix.NFTA_HOOK_HOOKNUM:
					c.hook = int(binary.BigEndian.Uint32(a.Data))
				case a.Type == unix.NFTA_HOOK_PRIORITY:
					c.priority = int(int32(binary.BigEndian.Uint32(a.Data)))
				}
			}
		}
		all = append(all, c)
	}
	return all, nil
}

// fingerprint looks at the inet table of this name; chains are those of all.
func (s *socket) fingerprint(name string, chains []baseChain) (fingerprint, error) {
	f := fingerprint{chains: map[string]string{}, rules: map[string][]string{}}
	tables, err := s.tables()
	if err != nil {
		return f, err
	}
	i := slices.IndexFunc(tables, func(t table) bool { return t.family == unix.NFPROTO_INET && t.name == name })
	if i < 0 {
		return f, nil
	}
	f.there, f.flags = true, fmt.Sprintf("%#x", tables[i].flags)
	for _, c := range chains {
		if c.family == unix.NFPROTO_INET && c.table == name {
			f.chains[c.name] = c.bytes
		}
	}
	replies, err := s.dump("rules of "+name, unix.NFT_MSG_GETRULE, unix.NFT_MSG_NEWRULE, unix.NFPROTO_INET, text(unix.NFTA_RULE_TABLE, name))
	if err != nil {
		return f, err
	}
	for _, r := range replies {
		attrs, err := attributes(r)
		if err != nil {
			return f, err
		}
		chain := str(attrs[unix.NFTA_RULE_CHAIN])
		f.rules[chain] = append(f.rules[chain], string(attrs[unix.NFTA_RULE_EXPRESSIONS])+string(attrs[unix.NFTA_RULE_USERDATA]))
	}
	f.sets, err = s.sets(name)
	return f, err
}

// sets names the sets of an inet table.
func (s *socket) sets(table string) (names []string, err error) {
	replies, err := s.dump("sets of "+table, unix.NFT_MSG_GETSET, unix.NFT_MSG_NEWSET, unix.NFPROTO_INET, text(unix.NFTA_SET_TABLE, table))
	if errors.Is(err, unix.ENOENT) {
		return nil, nil // gone since
	}
	if err != nil {
		return nil, err
	}
	for _, r := range replies {
		attrs, err := attributes(r)
		if err != nil {
			return nil, err
		}
		names = append(names, str(attrs[unix.NFTA_SET_NAME]))
	}
	return names, nil
}

// alive says whether the set NFTAlive of a table holds its element.
func (s *socket) alive(table string) (bool, error) {
	replies, err := s.dump("set "+rules.NFTAlive+" of "+table, unix.NFT_MSG_GETSETELEM, unix.NFT_MSG_NEWSETELEM, unix.NFPROTO_INET,
		text(unix.NFTA_SET_ELEM_LIST_TABLE, table), text(unix.NFTA_SET_ELEM_LIST_SET, rules.NFTAlive))
	if errors.Is(err, unix.ENOENT) {
		return false, nil
	}
	if err != nil {
		return false, err
	}
	for _, r := range replies {
		attrs, err := attributes(r)
		if err != nil {
			return false, err
		}
		if len(attrs[unix.NFTA_SET_ELEM_LIST_ELEMENTS]) > 0 {
			return true, nil
		}
	}
	return false, nil
}

// matches says whether f can be what was installed for t: nobody came between.
func (f fingerprint) matches(t rules.NFTTable) bool {
	if !f.there || len(f.chains) != len(t.Chains) {
		return false
	}
	for _, c := range t.Chains {
		if len(f.rules[c.Name]) != len(c.Rules) {
			return false
		}
	}
	return true
}

// differences names what of table is not as it was left.
func (f fingerprint) differences(table string, now fingerprint) (what []string) {
	if !now.there {
		return []string{"table inet " + table + " is gone"}
	}
	if f.flags != now.flags {
		what = append(what, "flags of table inet "+table+" are changed")
	}
	for _, c := range slices.Sorted(maps.Keys(f.chains)) {
		in := "chain " + c + " of table inet " + table
		switch is, there := now.chains[c]; {
		case !there:
			what = append(what, in+" is gone")
		case is != f.chains[c]:
			what = append(what, in+": hook, priority or policy is changed")
		case !slices.Equal(f.rules[c], now.rules[c]):
			what = append(what, in+": rules are changed")
		}
	}
	for _, c := range slices.Sorted(maps.Keys(now.chains)) {
		if _, ours := f.chains[c]; !ours {
			what = append(what, "chain "+c+" of table inet "+table+" is not ours")
		}
	}
	for _, s := range f.sets {
		if !slices.Contains(now.sets, s) {
			what = append(what, "set "+s+" of table inet "+table+" is gone")
		}
	}
	return what
}
