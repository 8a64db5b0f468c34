// Package iptables is the mode that diverts with iptables and ip6tables, where
// nftables cannot be used directly: chains of its own whose rules match while
// an ipset is kept alive, and a guard chain that refuses when it is not.
//
// What is installed is rules.IPTables, by iptables-restore: each table changes
// in one commit, so that no connect meets half a state. Nothing of anybody
// else is flushed or deleted; what is ours is found by its name. Others who put
// their jumps first, flush chains or destroy sets are told of by Verify, and the
// next Apply puts everything back in front.
package iptables
