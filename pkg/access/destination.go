package access

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"

	"github.com/kasway/kasway/pkg/observe"
)

// Destination is a parsed "host:port". Two ways to write the same one compare
// equal.
type Destination struct {
	// Host is a DNS name in lower case, or "" where Addr is valid.
	Host string
	// Addr is the literal address.
	Addr netip.Addr
	Port uint16
}

// String returns the one way in which this destination is written here.
func (d Destination) String() string {
	host := d.Host
	if d.Addr.IsValid() {
		host = d.Addr.String()
	}
	return net.JoinHostPort(host, strconv.Itoa(int(d.Port)))
}

// ParseDestination parses "name:port", "1.2.3.4:port" or "[fd00::1]:port".
func ParseDestination(s string) (Destination, error) {
	fail := func(why string) (Destination, error) {
		return Destination{}, fmt.Errorf(`destination "%s": %s`, observe.Text(s), why)
	}
	host, port, err := net.SplitHostPort(s)
	if err != nil {
		if strings.Count(s, ":") > 1 && !strings.Contains(s, "[") {
			return fail("an IPv6 address is written in brackets, as [fd00::1]:6443")
		}
		var addr *net.AddrError
		if errors.As(err, &addr) {
			return fail(addr.Err + "; want host:port")
		}
		return fail("want host:port")
	}
	n, err := strconv.ParseUint(port, 10, 16)
	if err != nil || n == 0 {
		return fail("the port must be a number from 1 to 65535")
	}
	d := Destination{Port: uint16(n)}
	if addr, err := netip.ParseAddr(host); err == nil {
		d.Addr = addr.Unmap()
		return d, nil
	}
	if strings.Contains(s, "[") {
		return fail("only an IPv6 address is written in brackets")
	}
	if !isName(host) {
		return fail("the host is neither an IP address nor a DNS name")
	}
	d.Host = strings.ToLower(host)
	return d, nil
}

// isName accepts what resolvers do: labels of letters, digits, hyphens and
// underscores, with or without the final dot.
func isName(s string) bool {
	s = strings.TrimSuffix(s, ".")
	if s == "" || len(s) > 253 {
		return false
	}
	for label := range strings.SplitSeq(s, ".") {
		if label == "" || len(label) > 63 || label[0] == '-' || label[len(label)-1] == '-' {
			return false
		}
		for _, c := range []byte(label) {
			ok := c >= 'a' && c <= 'z' || c >= 'A' && c <= 'Z' || c >= '0' && c <= '9' || c == '-' || c == '_'
			if !ok {
				return false
			}
		}
	}
	return true
}
