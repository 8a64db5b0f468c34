package config

import (
	"cmp"
	"fmt"
	"net"
	"net/netip"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/kasway/kasway/pkg/rules"
)

// The functions here read one text each. Their errors quote what was found and
// say what is allowed.

// oneOf accepts the given words.
func oneOf[T ~string](allowed ...T) func(string) (T, error) {
	return func(s string) (T, error) {
		if slices.Contains(allowed, T(s)) {
			return T(s), nil
		}
		words := make([]string, len(allowed))
		for i, a := range allowed {
			words[i] = string(a)
		}
		return "", fmt.Errorf("found %q; allowed: %s", s, strings.Join(words, ", "))
	}
}

// number is a whole number of the given range.
func number[T ~int | ~uint32](dst *T, low, high int64) shape {
	allowed := fmt.Sprintf("a whole number, %d-%d", low, high)
	return scalar(dst, "!!int", allowed, func(s string) (T, error) {
		n, err := strconv.ParseInt(s, 10, 64)
		if err != nil || n < low || n > high {
			return 0, fmt.Errorf("found %s; allowed: %s", s, allowed)
		}
		return T(n), nil
	})
}

// port is a TCP port written as a number.
func port(dst *uint16) shape {
	return scalar(dst, "!!int", "a port, 1-65535", rules.ParsePort)
}

// duration is a time with its unit, within bounds.
func duration(dst *time.Duration, low, high time.Duration) shape {
	allowed := fmt.Sprintf("a duration with its unit, %s to %s, such as 5s", short(low), short(high))
	return scalar(dst, "!!str", allowed, func(s string) (time.Duration, error) {
		t, err := time.ParseDuration(s)
		if err != nil || t < low || t > high {
			return 0, fmt.Errorf("found %q; allowed: %s", s, allowed)
		}
		return t, nil
	})
}

// short writes 1m0s as 1m.
func short(d time.Duration) string {
	s := d.String()
	if strings.HasSuffix(s, "m0s") {
		s = strings.TrimSuffix(s, "0s")
	}
	if strings.HasSuffix(s, "h0m") {
		s = strings.TrimSuffix(s, "0m")
	}
	return s
}

// hostPort is HOST:PORT of one host, in its canonical spelling.
func hostPort(s string) (string, error) {
	a, err := rules.ParseAddress(s)
	if err != nil {
		return "", err
	}
	if !a.Single() {
		return "", fmt.Errorf("%q is a prefix; allowed: one host, HOST:PORT", s)
	}
	return a.String(), nil
}

// listenAddress is where a listener of ours binds: [HOST]:PORT, with port 0 for
// any free one.
func listenAddress(s string) (string, error) {
	host, port, err := net.SplitHostPort(s)
	if err == nil {
		_, err = strconv.ParseUint(port, 10, 16)
	}
	if err == nil && host != "" && host != "localhost" {
		_, err = netip.ParseAddr(host)
	}
	if err != nil {
		return "", fmt.Errorf("found %q; allowed: IP:PORT, [IPv6]:PORT or :PORT for all addresses", s)
	}
	return s, nil
}

// optional accepts the empty text as well, for none.
func optional[T any](parse func(string) (T, error)) func(string) (T, error) {
	return func(s string) (T, error) {
		if s == "" {
			var none T
			return none, nil
		}
		return parse(s)
	}
}

// or accepts one word beside what parse does, and returns it as is.
func or(word string, is string, parse func(string) (string, error)) func(string) (string, error) {
	return func(s string) (string, error) {
		if s == word {
			return is, nil
		}
		out, err := parse(s)
		if err != nil {
			err = fmt.Errorf("%w; allowed as well: %s", err, word)
		}
		return out, err
	}
}

// localAddress is an IP address that this node can take for itself.
func localAddress(s string) (string, error) {
	addr, err := netip.ParseAddr(s)
	if err != nil {
		return "", fmt.Errorf("found %q; allowed: an IP address", s)
	}
	if _, err := rules.ParsePrefix(s); err != nil {
		return "", err
	}
	return addr.String(), nil
}

// nodeAddress is a local address of one family that pods can reach.
func nodeAddress(ipv6 bool) func(string) (string, error) {
	family, example := "IPv4", "169.254.77.1"
	if ipv6 {
		family, example = "IPv6", "fd00:6b77::1"
	}
	return func(s string) (string, error) {
		text, err := localAddress(s)
		if err != nil {
			return "", err
		}
		addr := netip.MustParseAddr(text)
		switch {
		case addr.Is6() != ipv6:
			return "", fmt.Errorf("found %s; allowed: an %s address, such as %s", s, family, example)
		case addr.IsLoopback(), addr.Is6() && addr.IsLinkLocalUnicast():
			return "", fmt.Errorf("found %s, which pods cannot reach; allowed: another %s address, such as %s", s, family, example)
		}
		return text, nil
	}
}

// clientPrefix is a set of client addresses. Unlike a target's prefix it may be
// everybody.
func clientPrefix(s string) (string, error) {
	if s == "0.0.0.0/0" || s == "::/0" {
		return s, nil
	}
	p, err := rules.ParsePrefix(s)
	return p.String(), err
}

// filePath names a file; the file itself is looked at when it is used.
func filePath(s string) (string, error) {
	if s == "" || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("found %q; allowed: the path of a file", s)
	}
	return s, nil
}

// absolutePath does not depend on where the process was started.
func absolutePath(s string) (string, error) {
	if !filepath.IsAbs(s) || strings.ContainsRune(s, 0) {
		return "", fmt.Errorf("found %q; allowed: an absolute path", s)
	}
	return filepath.Clean(s), nil
}

// maxSocketPath is what fits into a sockaddr_un.
const maxSocketPath = 107

func socketPath(s string) (string, error) {
	path, err := absolutePath(s)
	if err == nil && len(path) > maxSocketPath {
		err = fmt.Errorf("found a path of %d bytes; allowed: at most %d, which is what the kernel takes for a socket", len(path), maxSocketPath)
	}
	return path, err
}

// interfaceName is what the kernel accepts as one.
func interfaceName(s string) (string, error) {
	if s == "" || len(s) > 15 || s == "." || s == ".." || strings.ContainsAny(s, "/: \t\n\x00") {
		return "", fmt.Errorf("found %q; allowed: the name of an interface, 1-15 characters", s)
	}
	return s, nil
}

// display is a text that only people read.
func display(s string) (string, error) {
	bad := func(r rune) bool { return r < ' ' || r > '~' }
	if len(s) > 253 || strings.ContainsFunc(s, bad) {
		return "", fmt.Errorf("found %.64q; allowed: at most 253 printable ASCII characters", s)
	}
	return s, nil
}

// serverName is what a certificate can be verified against.
func serverName(s string) (string, error) {
	if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
		return addr.String(), nil
	}
	return rules.ParseHost(s)
}

// unitOf is the name of a unit of systemd that processes run in.
var unitOf = regexp.MustCompile(`^[0-9A-Za-z:_.\\@-]+\.(service|scope|socket|mount|swap)$`)

func unitName(s string) (string, error) {
	if len(s) > 255 || !unitOf.MatchString(s) {
		return "", fmt.Errorf("found %.64q; allowed: the full name of a systemd unit that processes run in, such as kubelet.service", s)
	}
	return s, nil
}

// named makes a function of rules that only checks one that reads.
func named(s string) (string, error) { return s, rules.CheckName(s) }

// twice returns the index of the first element that stands earlier as well.
func twice[T cmp.Ordered](list []T) (int, bool) {
	for i := range list {
		if slices.Contains(list[:i], list[i]) {
			return i, true
		}
	}
	return 0, false
}
