package rules

import (
	"fmt"
	"net/netip"
	"strings"
	"text/tabwriter"
)

// RenderBPFText tells people what the programs of mode ebpf are given: it is no
// language that a tool reads.
func RenderBPFText(s State) string {
	var b strings.Builder
	b.WriteString("# Programs on the hooks connect4 and connect6 send connects of")
	b.WriteString(clientsText(s.Clients))
	b.WriteString(" to these\n# addresses to the listeners beside them, before any address translation; getpeername4\n" +
		"# and getpeername6 show the address that was dialled, sockops tells who connected.\n")
	fmt.Fprintf(&b, "# Sockets with mark %#x/%#x pass. %s\n", s.Mark, s.MarkMask, whenDownText[s.WhenDown])
	t := tabwriter.NewWriter(&b, 0, 0, 2, ' ', 0)
	_, _ = fmt.Fprintln(t, "ADDRESS\tPORT\tTARGET\tHOST\tPODS") // a Builder takes everything
	for _, e := range RenderBPF(s) {
		d := &s.Diverts[e.Divert]
		host, pods := listenersText(s, d, e.Prefix.Addr().Is4())
		_, _ = fmt.Fprintf(t, "%s\t%d\t%s\t%s\t%s\n", prefixText(e.Prefix), e.Port, d.Name, host, pods)
	}
	_ = t.Flush()
	return b.String()
}

var whenDownText = map[WhenDown]string{
	Refuse: "If the agent dies, connects are refused.",
	Direct: "If the agent dies, connects pass untouched.",
}

func clientsText(c Clients) string {
	switch {
	case c.Host && c.Pods:
		return " the host and of pods"
	case c.Host:
		return " the host"
	}
	return " pods"
}

// listenersText is where connects of each kind of client go: "-" for nowhere.
func listenersText(s State, d *Divert, v4 bool) (host, pods string) {
	at := func(diverted bool, a netip.Addr, port uint16) string {
		switch {
		case !diverted || port == 0:
			return "-"
		case d.Refused:
			return "refused"
		}
		return netip.AddrPortFrom(a, port).String()
	}
	if v4 {
		return at(s.Clients.Host, netip.AddrFrom4([4]byte{127, 0, 0, 1}), d.Ports.Host4), at(s.Clients.Pods, s.Node4, d.Ports.Pod4)
	}
	return at(s.Clients.Host, netip.IPv6Loopback(), d.Ports.Host6), at(s.Clients.Pods, s.Node6, d.Ports.Pod6)
}
