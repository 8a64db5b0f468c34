// Package tproxy is the interception mode that gives connections to transparent
// listeners as they are: nothing is translated, and what an accepted socket
// calls its own address is the one that the client dialled.
//
// What is taken is marked, and a policy route leads the mark to this host. The
// route hangs on a TUN device that belongs to the agent's process (anchor): the
// kernel removes both whenever and however the agent ends. The rules are those
// of rules.PlanTProxyNFT or rules.PlanTProxyIPTables, and are kept by the modes
// that speak those languages.
//
// # What it cannot do
//
//   - A bridge with bridge-nf-call-iptables=1 loses the socket that a packet was
//     given: pods there are not taken. Preflight refuses, and Verify tells of it
//     if it comes later.
//   - IPVS takes what is addressed to a service before a listener gets it.
//   - kube-proxy rejects what is sent to a service without endpoints, in table
//     filter, where what is taken still has its address.
//   - A socket bound to a device (SO_BINDTODEVICE) is not led to this host by any
//     route; with Refuse its connects wait until they time out.
//   - With whenDown direct, a connect that a frozen agent's full backlog has not
//     answered, and whose agent is then killed, waits until it times out.
//
// # Why connections are tracked
//
// The usual way to keep kube-proxy from translating is NOTRACK. Measured on Linux
// 6.18, it breaks (by RST) the connections that the host has made before: nothing
// tells them from those taken. Rules that look at the first segment, and a mark
// on the tracked connection for the later ones, leave them alone; kube-proxy is
// kept away by a translation to the same address.
package tproxy
