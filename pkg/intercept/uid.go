package intercept

import (
	"encoding/binary"
	"fmt"
	"net/netip"
	"sync"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"
)

// UIDs tells which user a connection of this host's own comes from. It is safe
// for concurrent use.
type UIDs struct {
	mu   sync.Mutex
	conn *netlink.Conn
}

// NewUIDs looks at the network namespace of the calling thread.
func NewUIDs() (*UIDs, error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return nil, fmt.Errorf("opening netlink to look up users: %w", err)
	}
	return &UIDs{conn: c}, nil
}

// Close gives back what NewUIDs opened.
func (u *UIDs) Close() error { return u.conn.Close() }

// Of is the user id of the local socket that is connected from client to dst,
// the address that the client itself dialled. known is false where there is no
// such socket, such as when the client has closed it.
func (u *UIDs) Of(client, dst netip.AddrPort) (uid uint32, known bool) {
	if !client.IsValid() || !dst.IsValid() || client.Addr().Is4() != dst.Addr().Is4() {
		return 0, false
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	// Without the dump flag the kernel looks up exactly this socket in its hash.
	msgs, err := u.conn.Execute(netlink.Message{
		Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request},
		Data:   diagRequest(client, dst),
	})
	if err != nil || len(msgs) != 1 {
		return 0, false
	}
	return diagUID(msgs[0].Data, client, dst)
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

// diagUID reads the answer. Where no connection fits, the kernel answers with a
// listener on the same port, which is somebody else.
func diagUID(b []byte, src, dst netip.AddrPort) (uid uint32, known bool) {
	if len(b) < diagMsgLen || b[1] != stateEstablished {
		return 0, false
	}
	id := b[diagMsgID:]
	if diagAddr(b[0], id[idSrc:], id[idSrcPort:]) != src || diagAddr(b[0], id[idDst:], id[idDstPort:]) != dst {
		return 0, false
	}
	return binary.NativeEndian.Uint32(b[diagMsgUID:]), true
}

func diagAddr(family byte, addr, port []byte) netip.AddrPort {
	a := netip.AddrFrom16([16]byte(addr)).Unmap()
	if family == unix.AF_INET {
		a = netip.AddrFrom4([4]byte(addr))
	}
	return netip.AddrPortFrom(a, binary.BigEndian.Uint16(port))
}
