package rules

import (
	"errors"
	"fmt"
	"net/netip"
	"strconv"
	"strings"
)

// ParseAddress reads "10.96.0.1:443", "[fd00::1]:443", "10.9.0.0/16:6443",
// "[fd00::/64]:6443" or "kas.example.svc:6443". Host names are case-folded and
// need not have a dot. The error quotes s and says what to write instead.
func ParseAddress(s string) (Address, error) {
	a, err := parseAddress(s)
	if err != nil {
		return Address{}, fmt.Errorf("%q: %w", s, err)
	}
	return a, nil
}

// ParseTarget reads "LPORT:HOST:PORT", such as "6443:localhost:6443" or
// "443:[fd00::1]:6443": a target named HOST:PORT that mode listen offers on the
// local port LPORT.
func ParseTarget(s string) (Target, error) {
	lport, rest, ok := strings.Cut(s, ":")
	if !ok || !strings.Contains(rest, ":") {
		return Target{}, fmt.Errorf("%q: not LPORT:HOST:PORT; write for example 6443:localhost:6443 or 443:[fd00::1]:6443", s)
	}
	listen, err := ParsePort(lport)
	if err != nil {
		return Target{}, fmt.Errorf("%q: the local port in front: %w", s, err)
	}
	a, err := parseAddress(rest)
	if err != nil {
		return Target{}, fmt.Errorf("%q: %w", s, err)
	}
	if !a.Single() {
		return Target{}, fmt.Errorf("%q: a local port leads to one host, not to a prefix", s)
	}
	return Target{Name: a.String(), Addresses: []Address{a}, Listen: listen}, nil
}

// ParsePort reads a decimal port, 1-65535, without sign or leading zero.
func ParsePort(s string) (uint16, error) {
	n, err := strconv.ParseUint(s, 10, 16)
	if err != nil || n == 0 || strconv.FormatUint(n, 10) != s {
		return 0, fmt.Errorf("%q is not a port; allowed: 1-65535", s)
	}
	return uint16(n), nil
}

func parseAddress(s string) (Address, error) {
	host, port, bracketed, err := splitAddress(s)
	if err != nil {
		return Address{}, err
	}
	a := Address{}
	if a.Port, err = ParsePort(port); err != nil {
		return Address{}, err
	}
	if !bracketed && !strings.Contains(host, "/") {
		if _, err := netip.ParseAddr(host); err != nil {
			a.Host, err = ParseHost(host)
			return a, err
		}
	}
	a.Prefix, err = ParsePrefix(host)
	if err == nil && a.Prefix.Addr().Is4() == bracketed {
		err = errors.New("brackets are for IPv6 alone; write the IPv4 address without")
	}
	return a, err
}

// splitAddress takes host and port apart, which needs brackets around a host
// with colons: fd00::1:6443 is an address of its own as well.
func splitAddress(s string) (host, port string, bracketed bool, err error) {
	if rest, ok := strings.CutPrefix(s, "["); ok {
		host, port, ok = strings.Cut(rest, "]:")
		if !ok {
			return "", "", false, errors.New("no port behind the brackets; write for example [fd00::1]:443")
		}
		return host, port, true, nil
	}
	i := strings.LastIndexByte(s, ':')
	if i < 0 {
		return "", "", false, errors.New("no port; write HOST:PORT, for example 10.96.0.1:443 or kas.example:6443")
	}
	host, port = s[:i], s[i+1:]
	if strings.Contains(host, ":") {
		example := "[fd00::1]:443"
		if _, err := ParsePrefix(host); err == nil {
			example = "[" + host + "]:" + port
		}
		return "", "", false, fmt.Errorf("cannot tell an IPv6 address from its port; write it in brackets: %s", example)
	}
	return host, port, false, nil
}

// ParsePrefix reads an IP address or a prefix without host bits that TCP can be
// connected to. A single address is returned as a /32 or /128.
func ParsePrefix(s string) (netip.Prefix, error) {
	p, err := netip.ParsePrefix(s)
	if !strings.Contains(s, "/") {
		var addr netip.Addr
		addr, err = netip.ParseAddr(s)
		p = netip.PrefixFrom(addr, addr.BitLen())
	}
	switch addr := p.Addr(); {
	case strings.Contains(s, "%"):
		return netip.Prefix{}, errors.New("an address with a zone holds for one interface alone; write one without %")
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("%q is not an IP address or prefix; write for example 10.96.0.1, 10.9.0.0/16, fd00::1 or fd00::/64", s)
	case addr.Is4In6():
		return netip.Prefix{}, fmt.Errorf("%s is IPv4 written as IPv6; write it as IPv4 (%s)", s, addr.Unmap())
	case addr.IsUnspecified():
		return netip.Prefix{}, fmt.Errorf("%s means any address; name the ones that are meant", s)
	case addr.IsMulticast(), addr == netip.AddrFrom4([4]byte{255, 255, 255, 255}):
		return netip.Prefix{}, fmt.Errorf("%s is no address of one host; TCP cannot reach it", s)
	case p != p.Masked():
		return netip.Prefix{}, fmt.Errorf("%s has bits behind its length; write %s, or the address without a length", s, p.Masked())
	}
	return p, nil
}

// ParseHost checks a DNS name, absolute (with a final dot) or not, and returns
// it in lower case.
func ParseHost(s string) (string, error) {
	relative := strings.TrimSuffix(s, ".")
	labels := strings.Split(relative, ".")
	if len(relative) > 253 {
		return "", errors.New("the host name is longer than 253 characters")
	}
	for _, l := range labels {
		if err := checkLabel(l); err != nil {
			return "", fmt.Errorf("%q is not a host name: %w", s, err)
		}
	}
	// As in URLs: a name that ends in a number is a mistyped IPv4 address.
	if last := labels[len(labels)-1]; strings.Trim(last, "0123456789") == "" {
		return "", fmt.Errorf("%q is neither an IPv4 address nor a host name; write for example 10.96.0.1 or kas.example", s)
	}
	return strings.ToLower(s), nil
}

func checkLabel(l string) error {
	switch {
	case l == "":
		return errors.New("a part between its dots is empty")
	case len(l) > 63:
		return errors.New("a part between its dots is longer than 63 characters")
	case l[0] == '-' || l[len(l)-1] == '-':
		return errors.New("a part begins or ends with a hyphen")
	}
	for i := range len(l) {
		c := l[i]
		if c >= 0x80 {
			return errors.New("only ASCII is allowed; write an international name in its xn-- form")
		}
		if lower := c | 0x20; (lower < 'a' || lower > 'z') && (c < '0' || c > '9') && c != '-' {
			return fmt.Errorf("%q is not allowed; letters, digits, hyphens and dots are", c)
		}
	}
	return nil
}
