package intercept

import (
	"encoding/binary"
	"errors"
	"fmt"

	"github.com/mdlayher/netlink"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/rules"
)

const (
	sockDestroy  = 21 // of the same family as sockDiagByFamily
	stateSynSent = 2
)

// Interrupt ends the connects of this host to targets of s that are under way:
// they meet ECONNABORTED. It is for the first Apply of modes that decide when
// connect is called, in the calling thread's network namespace.
//
// A client that dials before the agent is there waits for an answer from behind
// a firewall, and would do so to the end of its patience, which is half a minute
// for KAS clients, whatever is diverted meanwhile. Interrupted, it dials again.
// Sockets of other network namespaces are out of reach.
func Interrupt(s rules.State) (ended int, err error) {
	c, err := netlink.Dial(unix.NETLINK_SOCK_DIAG, nil)
	if err != nil {
		return 0, fmt.Errorf("opening netlink to look for connects that are under way: %w", err)
	}
	defer c.Close()
	for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
		waiting, lerr := c.Execute(netlink.Message{
			Header: netlink.Header{Type: sockDiagByFamily, Flags: netlink.Request | netlink.Dump},
			Data:   diagStates(family, 1<<stateSynSent),
		})
		if lerr != nil {
			err = errors.Join(err, fmt.Errorf("looking for connects that are under way: %w", lerr))
		}
		for _, m := range waiting {
			id, ok := dialsTarget(m.Data, s)
			if !ok {
				continue
			}
			_, derr := c.Execute(netlink.Message{
				Header: netlink.Header{Type: sockDestroy, Flags: netlink.Request | netlink.Acknowledge},
				Data:   append(diagStates(family, 1<<stateSynSent)[:diagRequestID], id...),
			})
			switch {
			case derr == nil:
				ended++
			case !errors.Is(derr, unix.ENOENT): // it has ended by itself
				err = errors.Join(err, fmt.Errorf("interrupting a connect that is under way: %w", derr))
			}
		}
	}
	return ended, err
}

// diagStates asks for all TCP sockets of a family that are in one of the states.
func diagStates(family byte, states uint32) []byte {
	b := make([]byte, diagRequestLen)
	b[0], b[1] = family, unix.IPPROTO_TCP
	binary.NativeEndian.PutUint32(b[4:], states)
	return b
}

// dialsTarget returns the id of a socket, with the cookie that makes it that of
// no other, if it is dialling a target.
func dialsTarget(msg []byte, s rules.State) (id []byte, ok bool) {
	if len(msg) < diagMsgLen || msg[1] != stateSynSent {
		return nil, false
	}
	id = msg[diagMsgID : diagMsgID+diagRequestLen-diagRequestID]
	dst := diagAddr(msg[0], id[idDst:], id[idDstPort:])
	_, ok = s.Match(dst)
	return id, ok
}
