package tunnel

import (
	"fmt"
	"strings"
	"unicode"

	"google.golang.org/grpc"

	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

var (
	controlStream = grpc.StreamDesc{StreamName: "Control", ServerStreams: true, ClientStreams: true}
	forwardStream = grpc.StreamDesc{StreamName: "Forward", ServerStreams: true, ClientStreams: true}
)

// newHello is what this release says of itself.
func newHello(version, name string) *tunnelpb.Hello {
	return &tunnelpb.Hello{
		Version:     clean(version),
		Protocol:    tunnelpb.Protocol,
		MinProtocol: tunnelpb.MinProtocol,
		Name:        clean(name),
	}
}

// versionError: the peers have no protocol in common.
type versionError struct{ text string }

func (e *versionError) Error() string { return e.text }

// checkHello says whether the peers understand each other. The error names both
// versions, so that people see which side to upgrade.
func checkHello(ownRole string, own *tunnelpb.Hello, peerRole string, peer *tunnelpb.Hello) error {
	if peer.GetMinProtocol() == 0 || peer.GetMinProtocol() > peer.GetProtocol() {
		return &versionError{fmt.Sprintf("%s %s says that it speaks protocols %d to %d, which is no range",
			peerRole, clean(peer.GetVersion()), peer.GetMinProtocol(), peer.GetProtocol())}
	}
	if peer.GetMinProtocol() <= own.GetProtocol() && own.GetMinProtocol() <= peer.GetProtocol() {
		return nil
	}
	return &versionError{fmt.Sprintf("no common protocol: %s %s speaks %d to %d, %s %s speaks %d to %d",
		ownRole, own.GetVersion(), own.GetMinProtocol(), own.GetProtocol(),
		peerRole, clean(peer.GetVersion()), peer.GetMinProtocol(), peer.GetProtocol())}
}

// clean makes a name that a peer sent fit for logs and tables.
func clean(s string) string {
	s = truncate(strings.ToValidUTF8(s, "?"), tunnelpb.MaxName)
	return strings.Map(func(r rune) rune {
		if !unicode.IsPrint(r) {
			return '?'
		}
		return r
	}, s)
}
