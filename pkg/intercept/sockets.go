package intercept

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// Sockets tells whose the sockets of this host's own are. It is safe for
// concurrent use.
type Sockets struct {
	mu   sync.Mutex
	conn *netlink.Conn
}

// NewSockets looks at the network namespace of the calling thread.
func NewSockets() (*Sockets, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("opening netlink to look up the owners of sockets: %w", err)
	}
	return &Sockets{conn: c}, nil
}

// Close gives back what NewSockets opened.
func (s *Sockets) Close() error { return s.conn.Close() }

// Owner is whose a socket is.
type Owner struct {
	UID uint32
	// CgroupID is that of the cgroup of version 2 in which the socket was made;
	// 0 if the kernel does not tell (before Linux 5.8).
	CgroupID uint64
}

// Owner is that of the local socket which is connected from client to dst, the
// address that the client itself dialled. known is false where there is no such
// socket, such as when the client has closed it.
func (s *Sockets) Owner(client, dst netip.AddrPort) (o Owner, known bool) {
	if !client.IsValid() || !dst.IsValid() || client.Addr().Is4() != dst.Addr().Is4() {
		return o, false
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	// Without the dump flag the kernel looks up exactly this socket in its hash.
	msgs, err := s.conn.Execute(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request},
		Data:   diagRequest(client, dst),
	})
	if err != nil || len(msgs) != 1 {
		return o, false
	}
	return diagOwner(msgs[0].Data, client, dst)
}

// Layout of struct inet_diag_req_v2 and inet_diag_msg of <linux/inet_diag.h>,
// and of the socket's id that both hold.
const (
	sockDiagByFamily = 20
	diagRequestLen   = 56
	diagRequestID    = 8
	diagMsgLen       = 72
	diagMsgID        = 4
	diagMsgUID       = 64
	idSrcPort        = 0
	idDstPort        = 2
	idSrc            = 4
	idDst            = 20
	idCookie         = 40
	stateEstablished = 1
	diagCgroupID     = 21 // attribute INET_DIAG_CGROUP_ID
)

func diagRequest(src, dst netip.AddrPort) []byte {
	b := make([]byte, diagRequestLen)
	b[0] = unix.AF_INET6
	if src.Addr().Is4() {
		b[0] = unix.AF_INET
	}
	b[1] = unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], ^uint32(0)) // any state
	id := b[diagRequestID:]
	binary.BigEndian.PutUint16(id[idSrcPort:], src.Port())
	binary.BigEndian.PutUint16(id[idDstPort:], dst.Port())
	copy(id[idSrc:], src.Addr().AsSlice())
	copy(id[idDst:], dst.Addr().AsSlice())
	// No cookie: the kernel compares none.
	binary.NativeEndian.PutUint64(id[idCookie:], ^uint64(0))
	return b
}

// diagOwner reads the answer. Where no connection fits, the kernel answers with
// a listener on the same port, which is somebody else.
func diagOwner(b []byte, src, dst netip.AddrPort) (o Owner, known bool) {
	if len(b) < diagMsgLen || b[1] != stateEstablished {
		return o, false
	}
	id := b[diagMsgID:]
	if diagAddr(b[0], id[idSrc:], id[idSrcPort:]) != src || diagAddr(b[0], id[idDst:], id[idDstPort:]) != dst {
		return o, false
	}
	o.UID = binary.NativeEndian.Uint32(b[diagMsgUID:])
	attributes, err := netlink.NewAttributeDecoder(b[diagMsgLen:])
	for err == nil && attributes.Next() {
		if attributes.Type() == diagCgroupID {
			o.CgroupID = attributes.Uint64()
		}
	}
	return o, true
}

func diagAddr(family byte, addr, port []byte) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(addr)).Unmap()
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(addr))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
}
