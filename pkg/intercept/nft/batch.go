package nft

import (
	"encoding/binary"
	"fmt"

	"github.com/google/nftables/userdata"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

const tableOwner = 0x2 // NFT_TABLE_F_OWNER

// batch collects the messages of one transaction. Nothing reaches the kernel
// before commit.
//
// github.com/google/nftables is used for expressions alone: it can neither set
// the flag owner nor do without an answer per message, which overruns the
// socket's queue with some hundred rules.
type batch struct {
	msgs  []netlink.Message
	names []string // what each message is about, for errors
	err   error    // the first that could not be encoded
}

// messages is the transaction as it goes to the kernel: begin, all messages,
// end. The last message asks for an answer; the others are answered only if
// they fail.
func (b *batch) messages() []netlink.Message {
	bound := func(kind uint16) netlink.Message {
		return netlink.Message{Header: netlink.Header{Type: netlink.HeaderType(kind), Flags: netlink.Request},
			Data: []byte{unix.AF_UNSPEC, unix.NFNETLINK_V0, 0, unix.NFNL_SUBSYS_NFTABLES}}
	}
	all := append([]netlink.Message{bound(unix.NFNL_MSG_BATCH_BEGIN)}, b.msgs...)
	all[len(all)-1].Header.Flags |= netlink.Acknowledge
	return append(all, bound(unix.NFNL_MSG_BATCH_END))
}

// describe names the i-th message of messages.
func (b *batch) describe(i int) string {
	if i >= 1 && i <= len(b.names) {
		return b.names[i-1]
	}
	return "transaction"
}

func (b *batch) add(what string, kind uint16, family byte, flags netlink.HeaderFlags, attrs ...netlink.Attribute) {
	b.msgs = append(b.msgs, message(kind, family, flags, b.encode(attrs)))
	b.names = append(b.names, what)
}

func message(kind uint16, family byte, flags netlink.HeaderFlags, attrs []byte) netlink.Message {
	return netlink.Message{
		Header: netlink.Header{Type: netlink.HeaderType(unix.NFNL_SUBSYS_NFTABLES<<8 | kind), Flags: netlink.Request | flags},
		Data:   append([]byte{family, unix.NFNETLINK_V0, 0, 0}, attrs...),
	}
}

func (b *batch) encode(attrs []netlink.Attribute) []byte {
	data, err := netlink.MarshalAttributes(attrs)
	if err != nil && b.err == nil {
		b.err = fmt.Errorf("nftables: encoding attributes: %w", err)
	}
	return data
}

func text(kind uint16, s string) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: append([]byte(s), 0)}
}

func number(kind uint16, n uint32) netlink.Attribute {
	return netlink.Attribute{Type: kind, Data: binary.BigEndian.AppendUint32(nil, n)}
}

func (b *batch) nested(kind uint16, attrs ...netlink.Attribute) netlink.Attribute {
	return netlink.Attribute{Type: unix.NLA_F_NESTED | kind, Data: b.encode(attrs)}
}

// deleteTable removes a table and all in it; it must exist.
func (b *batch) deleteTable(family byte, name string) {
	b.add("removing table "+name, unix.NFT_MSG_DELTABLE, family, 0, text(unix.NFTA_TABLE_NAME, name))
}

// addTable adds an empty table, or leaves one that exists.
func (b *batch) addTable(t rules.NFTTable) {
	var flags uint32
	if t.Owner {
		flags = tableOwner
	}
	b.add("adding table "+t.Name, unix.NFT_MSG_NEWTABLE, unix.NFPROTO_INET, netlink.Create,
		text(unix.NFTA_TABLE_NAME, t.Name), number(unix.NFTA_TABLE_FLAGS, flags))
}

// removeTable removes the table whether or not it exists.
func (b *batch) removeTable(t rules.NFTTable) {
	b.addTable(t)
	b.deleteTable(unix.NFPROTO_INET, t.Name)
}

// rebuild makes the table anew, whatever it held.
func (b *batch) rebuild(t rules.NFTTable) {
	b.removeTable(t)
	b.addTable(t)
	if t.Alive {
		b.addAlive(t.Name)
	}
	for _, c := range t.Chains {
		b.addChain(t.Name, c)
	}
	b.addRules(t)
}

// refill replaces the rules of a table that has the chains of t already. A
// packet meets the old rules of a chain or its new ones; were the chains
// replaced, it could meet a new one not yet in force and then an old one no
// longer in force.
func (b *batch) refill(t rules.NFTTable) {
	b.add("flushing table "+t.Name, unix.NFT_MSG_DELRULE, unix.NFPROTO_INET, 0, text(unix.NFTA_RULE_TABLE, t.Name))
	b.addRules(t)
}

func (b *batch) addAlive(table string) {
	b.add(table+": adding set "+rules.NFTAlive, unix.NFT_MSG_NEWSET, unix.NFPROTO_INET, netlink.Create,
		text(unix.NFTA_SET_TABLE, table),
		text(unix.NFTA_SET_NAME, rules.NFTAlive),
		number(unix.NFTA_SET_FLAGS, unix.NFT_SET_TIMEOUT|unix.NFT_SET_EVAL),
		number(unix.NFTA_SET_KEY_TYPE, 19), // nft's number for mark
		number(unix.NFTA_SET_KEY_LEN, 4),
		number(unix.NFTA_SET_ID, aliveID),
		b.nested(unix.NFTA_SET_DESC, number(unix.NFTA_SET_DESC_SIZE, rules.NFTAliveSize)),
		netlink.Attribute{Type: unix.NFTA_SET_TIMEOUT, Data: binary.BigEndian.AppendUint64(nil, uint64(rules.AliveTimeout.Milliseconds()))})
	key := b.nested(unix.NFTA_SET_ELEM_KEY, netlink.Attribute{Type: unix.NFTA_DATA_VALUE, Data: native(0)})
	b.add(table+": adding to set "+rules.NFTAlive, unix.NFT_MSG_NEWSETELEM, unix.NFPROTO_INET, netlink.Create,
		text(unix.NFTA_SET_ELEM_LIST_TABLE, table), text(unix.NFTA_SET_ELEM_LIST_SET, rules.NFTAlive),
		b.nested(unix.NFTA_SET_ELEM_LIST_ELEMENTS, b.nested(unix.NFTA_LIST_ELEM, key)))
}

var hooks = map[string]uint32{"prerouting": unix.NF_INET_PRE_ROUTING, "output": unix.NF_INET_LOCAL_OUT,
	"postrouting": unix.NF_INET_POST_ROUTING}

func (b *batch) addChain(table string, c rules.NFTChain) {
	attrs := []netlink.Attribute{text(unix.NFTA_CHAIN_TABLE, table), text(unix.NFTA_CHAIN_NAME, c.Name)}
	if c.Hook != "" {
		hook := hooks[c.Hook]
		attrs = append(attrs,
			text(unix.NFTA_CHAIN_TYPE, c.Type),
			number(unix.NFTA_CHAIN_POLICY, 1), // NF_ACCEPT
			b.nested(unix.NFTA_CHAIN_HOOK, number(unix.NFTA_HOOK_HOOKNUM, hook), number(unix.NFTA_HOOK_PRIORITY, uint32(int32(c.Priority)))))
	}
	b.add(table+": adding chain "+c.Name, unix.NFT_MSG_NEWCHAIN, unix.NFPROTO_INET, netlink.Create, attrs...)
}

func (b *batch) addRules(t rules.NFTTable) {
	for _, c := range t.Chains {
		for _, r := range c.Rules {
			exprs, err := encodeRule(r)
			if err != nil && b.err == nil {
				b.err = fmt.Errorf("nftables: encoding the rule %q: %w", r, err)
			}
			var list []netlink.Attribute
			for _, e := range exprs {
				list = append(list, netlink.Attribute{Type: unix.NLA_F_NESTED | unix.NFTA_LIST_ELEM, Data: e})
			}
			attrs := []netlink.Attribute{text(unix.NFTA_RULE_TABLE, t.Name), text(unix.NFTA_RULE_CHAIN, c.Name),
				b.nested(unix.NFTA_RULE_EXPRESSIONS, list...)}
			if r.Comment != "" {
				attrs = append(attrs, netlink.Attribute{Type: unix.NFTA_RULE_USERDATA,
					Data: userdata.AppendString(nil, userdata.TypeComment, r.Comment)})
			}
			b.add(t.Name+" "+c.Name+": adding rule "+r.String(), unix.NFT_MSG_NEWRULE, unix.NFPROTO_INET, netlink.Create|netlink.Append, attrs...)
		}
	}
}
