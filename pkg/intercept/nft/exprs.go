package nft

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// Where TCP (and UDP) keep what the rules look at, and flags: fin, syn, rst, ack.
const (
	dport        = 2
	tcpFlags     = 13
	tcpSYN       = 0x02
	tcpFlagsMask = 0x17

	statusConfirmed = 0x08 // IPS_CONFIRMED
	loIndex         = 1    // lo has it in every network namespace
	reg             = 1
	aliveID         = 1 // of the set, within a transaction
)

// encodeRule makes of a rule what nft makes of its text: the test that loads
// both and compares them holds the two together.
func encodeRule(r rules.NFTRule) ([][]byte, error) {
	var p program
	if r.Beat.IsValid() {
		p.beat(r)
		return p.exprs, p.err
	}
	if r.NotLoopback {
		p.add(&expr.Meta{Key: expr.MetaKeyIIF, Register: reg}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: native(loIndex)})
	}
	if r.Loopback {
		p.add(&expr.Meta{Key: expr.MetaKeyIIF, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: native(loIndex)})
	}
	if r.ToOthers {
		p.add(&expr.Meta{Key: expr.MetaKeyOIF, Register: reg}, &expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: native(loIndex)})
	}
	if r.SYN {
		p.syn(expr.CmpOpEq)
	}
	if r.NotSYN {
		p.syn(expr.CmpOpNeq)
	}
	if r.NotForDevice {
		p.add(&expr.Fib{Register: reg, FlagDADDR: true, FlagIIF: true, ResultADDRTYPE: true},
			&expr.Cmp{Op: expr.CmpOpNeq, Register: reg, Data: native(unix.RTN_LOCAL)})
	}
	if r.Alive != rules.AliveAny {
		p.zero()
		p.add(&expr.Lookup{SourceRegister: reg, SetName: rules.NFTAlive, SetID: aliveID, Invert: r.Alive == rules.AliveNo})
	}
	if r.Mask != 0 {
		p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg})
		p.masked(native(r.Mask), expr.CmpOpNeq, native(r.Mark))
	}
	p.taken(r)
	if r.New {
		p.add(&expr.Ct{Key: expr.CtKeySTATE, Register: reg})
		p.masked(native(expr.CtStateBitNEW), expr.CmpOpNeq, native(0))
	}
	if r.Seen {
		p.add(&expr.Ct{Key: expr.CtKeySTATUS, Register: reg})
		p.masked(native(statusConfirmed), expr.CmpOpNeq, native(0))
	}
	p.from(r.From, expr.CmpOpEq)
	p.from(r.NotFrom, expr.CmpOpNeq)
	p.destination(r)
	p.verdict(r)
	return p.exprs, p.err
}

// program is the list of encoded expressions of one rule.
type program struct {
	exprs [][]byte
	err   error
}

func (p *program) add(list ...expr.Any) {
	for _, e := range list {
		data, err := expr.Marshal(unix.NFPROTO_INET, e)
		if err != nil && p.err == nil {
			p.err = err
		}
		p.exprs = append(p.exprs, data)
	}
}

func native(n uint32) []byte { return binary.NativeEndian.AppendUint32(nil, n) }

// masked compares the register under a mask.
func (p *program) masked(mask []byte, op expr.CmpOp, value []byte) {
	p.add(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: uint32(len(mask)), Mask: mask, Xor: make([]byte, len(mask))},
		&expr.Cmp{Op: op, Register: reg, Data: value})
}

// syn compares whether the segment opens a connection.
func (p *program) syn(op expr.CmpOp) {
	p.tcp()
	p.add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: tcpFlags, Len: 1})
	p.masked([]byte{tcpFlagsMask}, op, []byte{tcpSYN})
}

func (p *program) tcp() { p.protocol(unix.IPPROTO_TCP) }

func (p *program) protocol(n byte) {
	p.add(&expr.Meta{Key: expr.MetaKeyL4PROTO, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{n}})
}

// zero loads the key of the set alive.
func (p *program) zero() {
	p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg},
		&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4, Mask: native(0), Xor: native(0)})
}

func (p *program) beat(r rules.NFTRule) {
	p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg})
	p.masked(native(r.Mask), expr.CmpOpEq, native(r.Mark))
	p.daddr(netip.PrefixFrom(r.Beat.Addr(), r.Beat.Addr().BitLen()))
	p.protocol(unix.IPPROTO_UDP)
	p.dport(r.Beat.Port())
	p.zero()
	p.add(&expr.Dynset{SrcRegKey: reg, SetName: rules.NFTAlive, SetID: aliveID, Operation: unix.NFT_DYNSET_OP_UPDATE},
		&expr.Verdict{Kind: expr.VerdictDrop})
}

func protocolFamily(a netip.Addr) byte {
	if a.Is4() {
		return unix.NFPROTO_IPV4
	}
	return unix.NFPROTO_IPV6
}

func (p *program) family(a netip.Addr) {
	p.add(&expr.Meta{Key: expr.MetaKeyNFPROTO, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{protocolFamily(a)}})
}

// destinationAddress loads the destination of a packet of a's family.
func destinationAddress(a netip.Addr) *expr.Payload {
	daddr := &expr.Payload{DestRegister: reg, Base: expr.PayloadBaseNetworkHeader, Offset: 24, Len: 16}
	if a.Is4() {
		daddr.Offset, daddr.Len = 16, 4
	}
	return daddr
}

// prefix compares the address in the register.
func (p *program) prefix(want netip.Prefix) {
	addr := want.Masked().Addr().AsSlice()
	if want.IsSingleIP() {
		p.add(&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: addr})
		return
	}
	mask := make([]byte, len(addr))
	for i := range want.Bits() {
		mask[i/8] |= 0x80 >> (i % 8)
	}
	p.masked(mask, expr.CmpOpEq, addr)
}

func (p *program) port(n uint16) {
	p.add(&expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: binary.BigEndian.AppendUint16(nil, n)})
}

func (p *program) daddr(want netip.Prefix) {
	p.family(want.Addr())
	if want.Bits() == 0 {
		return
	}
	p.add(destinationAddress(want.Addr()))
	p.prefix(want)
}

func (p *program) dport(n uint16) {
	p.add(&expr.Payload{DestRegister: reg, Base: expr.PayloadBaseTransportHeader, Offset: dport, Len: 2})
	p.port(n)
}

func (p *program) destination(r rules.NFTRule) {
	if !r.Dst.IsValid() {
		return
	}
	p.daddr(r.Dst)
	if r.Port != 0 {
		p.tcp()
		p.dport(r.Port)
	}
}

// from compares the address that the connection's answers come from. expr.Ct
// would leave the direction out, where the key has a family.
func (p *program) from(a netip.Addr, op expr.CmpOp) {
	if !a.IsValid() {
		return
	}
	key := uint32(unix.NFT_CT_SRC_IP6)
	if a.Is4() {
		key = unix.NFT_CT_SRC_IP
	}
	data, err := netlink.MarshalAttributes([]netlink.Attribute{
		number(unix.NFTA_CT_KEY, key), number(unix.NFTA_CT_DREG, reg),
		{Type: unix.NFTA_CT_DIRECTION, Data: []byte{1}}, // IP_CT_DIR_REPLY
	})
	if err == nil {
		data, err = netlink.MarshalAttributes([]netlink.Attribute{text(unix.NFTA_EXPR_NAME, "ct"),
			{Type: unix.NLA_F_NESTED | unix.NFTA_EXPR_DATA, Data: data}})
	}
	if err != nil && p.err == nil {
		p.err = err
	}
	p.exprs = append(p.exprs, data)
	p.add(&expr.Cmp{Op: op, Register: reg, Data: a.AsSlice()})
}

func (p *program) verdict(r rules.NFTRule) {
	switch {
	case r.To.IsValid():
		p.add(&expr.Immediate{Register: reg, Data: r.To.Addr().AsSlice()},
			&expr.Immediate{Register: reg + 1, Data: binary.BigEndian.AppendUint16(nil, r.To.Port())},
			&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(protocolFamily(r.To.Addr())), RegAddrMin: reg, RegProtoMin: reg + 1, Specified: true})
	case r.Goto != "":
		p.add(&expr.Verdict{Kind: expr.VerdictGoto, Chain: r.Goto})
	case r.Reject:
		p.add(&expr.Reject{Type: unix.NFT_REJECT_TCP_RST})
	case r.Drop:
		p.add(&expr.Verdict{Kind: expr.VerdictDrop})
	case r.Assign.IsValid() || r.Take || r.Keep || r.AsItIs:
		p.take(r)
	default:
		p.add(&expr.Verdict{Kind: expr.VerdictReturn})
	}
}
