// Package tunnel carries connections from agents to servers: one gRPC
// connection (a link) per agent and server, one stream on it per carried TCP
// connection. docs/protocol.md is the specification of what it speaks.
//
// An agent uses Links, whose Dial is a dial.Func; a server uses Server, which
// calls a dial.Func for every stream. Both see a stream as a Conn.
package tunnel
