package nft

import (
	"encoding/binary"
	"fmt"
	"strings"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

// table is a table that the kernel has.
type table struct {
	family byte
	name   string
	flags  uint32
	owned  bool // by a socket of a living process
}

func (t table) ours() bool { return strings.HasPrefix(t.name, rules.NFTPrefix) }

// tables lists the tables of all families.
func (s *socket) tables() ([]table, error) {
	_, replies, err := s.exchange([]netlink.Message{message(unix.NFT_MSG_GETTABLE, unix.AF_UNSPEC, netlink.Dump, nil)})
	if err != nil {
		return nil, err
	}
	var all []table
	for _, r := range replies {
		if err := answer(r); err != nil {
			return nil, fmt.Errorf("nftables: listing tables: %w", err)
		}
		if r.Header.Type != unix.NFNL_SUBSYS_NFTABLES<<8|unix.NFT_MSG_NEWTABLE || len(r.Data) < 4 {
			continue
		}
		t := table{family: r.Data[0]}
		attrs, err := netlink.NewAttributeDecoder(r.Data[4:])
		if err != nil {
			return nil, fmt.Errorf("nftables: listing tables: %w", err)
		}
		attrs.ByteOrder = binary.BigEndian
		for attrs.Next() {
			switch attrs.Type() {
			case unix.NFTA_TABLE_NAME:
				t.name = attrs.String()
			case unix.NFTA_TABLE_FLAGS:
				t.flags = attrs.Uint32()
				t.owned = t.flags&tableOwner != 0
			}
		}
		if err := attrs.Err(); err != nil {
			return nil, fmt.Errorf("nftables: listing tables: %w", err)
		}
		all = append(all, t)
	}
	return all, nil
}

// answer is the error that a reply stands for, if it is one.
func answer(r netlink.Message) error {
	if r.Header.Type != netlink.Error || len(r.Data) < 4 {
		return nil
	}
	if errno := -int32(binary.NativeEndian.Uint32(r.Data)); errno != 0 {
		return unix.Errno(errno)
	}
	return nil
}
