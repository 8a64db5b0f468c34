// Package nft is the interception mode that diverts with nftables, and the
// dead-agent guards that are made of nftables.
//
// Everything goes over netlink; the nft program is not needed. The table that
// diverts belongs to the agent's netlink socket (flag owner), so that the
// kernel removes it whenever and however the agent ends. What is installed is
// decided by rules.PlanNFT, and printed by rules.RenderNFT. Nobody else can touch
// that table, but the guards: Verify compares them with what Apply has left.
package nft
