package nft

import (
	"encoding/binary"
	"net/netip"

	"github.com/google/nftables/expr"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// taken compares the marks of mode tproxy.
func (p *program) taken(r rules.NFTRule) {
	ops := map[rules.NFTTaken]expr.CmpOp{rules.TakenYes: expr.CmpOpEq, rules.TakenNo: expr.CmpOpNeq}
	if op, asked := ops[r.Taken]; asked {
		p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg})
		p.masked(native(rules.TProxyMask), op, native(rules.TProxyMark))
	}
	if op, asked := ops[r.OfTaken]; asked {
		p.add(&expr.Ct{Key: expr.CtKeyMARK, Register: reg})
		p.masked(native(rules.TProxyMask), op, native(rules.TProxyMark))
	}
	if r.OfTaken == rules.TakenYes {
		p.add(&expr.Ct{Key: expr.CtKeyDIRECTION, Register: reg}, &expr.Cmp{Op: expr.CmpOpEq, Register: reg, Data: []byte{0}}) // IP_CT_DIR_ORIGINAL
	}
}

// take is the verdicts of mode tproxy.
func (p *program) take(r rules.NFTRule) {
	if r.AsItIs {
		p.add(&expr.Ct{Key: expr.CtKeyMARK, Register: reg})
		p.setTaken()
		p.add(&expr.Ct{Key: expr.CtKeyMARK, Register: reg, SourceRegister: true})
		p.asItIs(r.Dst.Addr())
		return
	}
	if r.Assign.IsValid() {
		p.add(&expr.Immediate{Register: reg, Data: r.Assign.Addr().AsSlice()},
			&expr.Immediate{Register: reg + 1, Data: binary.BigEndian.AppendUint16(nil, r.Assign.Port())},
			&expr.TProxy{Family: protocolFamily(r.Assign.Addr()), TableFamily: unix.NFPROTO_INET, RegAddr: reg, RegPort: reg + 1})
	}
	p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg})
	p.setTaken()
	p.add(&expr.Meta{Key: expr.MetaKeyMARK, Register: reg, SourceRegister: true})
	if !r.Keep {
		p.add(&expr.Verdict{Kind: expr.VerdictAccept})
	}
}

// setTaken sets the mark in the register.
func (p *program) setTaken() {
	p.add(&expr.Bitwise{SourceRegister: reg, DestRegister: reg, Len: 4,
		Mask: native(^uint32(rules.TProxyMask)), Xor: native(rules.TProxyMark)})
}

// asItIs translates the destination to what it is.
func (p *program) asItIs(family netip.Addr) {
	p.add(destinationAddress(family),
		&expr.NAT{Type: expr.NATTypeDestNAT, Family: uint32(protocolFamily(family)), RegAddrMin: reg})
}
