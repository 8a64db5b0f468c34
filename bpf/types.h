// SPDX-License-Identifier: GPL-2.0
// What the programs and the agent share. Addresses are 16 bytes, IPv4 v4-mapped;
// ports and addresses are in network order, everything else in the host's.
#pragma once
#include <linux/bpf.h>
#include <linux/types.h>

// kw_verdict is what became of a connect to a target; the numbers index counters.
enum kw_verdict {
	KW_PASS,          // left alone: these clients are not diverted
	KW_DIVERTED,
	KW_REFUSED,       // the agent lives, and refuses
	KW_STALE_REFUSED, // it is dead or frozen
	KW_STALE_PASSED,
	KW_OWN,           // the agent's own
	KW_DEVICE,        // bound to a device
	KW_VERDICTS,
};

// Counters are per target up to KW_COUNTED, which all others share.
#define KW_COUNTED 64

struct kw_cfg {
	__u64 host_netns;       // cookie of the host's network namespace
	__u64 max_age;          // ns after which the heartbeat is stale
	__u32 mark, mark_mask;  // of the agent's own sockets
	__u8 node4[16], node6[16]; // where pods are diverted to
	__u8 host, pods;        // whose connects are diverted
	__u8 refuse_when_down;
	__u8 learn;             // tell the agent its namespace's cookie
	__u8 pad[4];
};

// kw_key is the key of a trie: bits counts those behind it that matter. An IPv6
// prefix such as ::/0 must not hold the v4-mapped addresses: v6 comes first.
struct kw_key {
	__u32 bits;
	__u16 port;
	__u16 v6;
	__u8 addr[16];
} __attribute__((packed));

struct kw_target {
	__u32 index;   // in the order of the configuration
	__u16 port[4]; // of its listeners: host v4, host v6, pods v4, pods v6; 0: none
	__u8 refused;
	__u8 pad[3];
};

// kw_connect is what is known of a connect besides its destination.
struct kw_connect {
	__u64 netns, now, beat;
	__u32 mark, bound_dev;
	__u8 v6, own;
	__u8 pad[6];
};

// kw_who is who connected, for people and guards.
struct kw_who {
	__u64 netns, cgroup;
	__u32 pid, uid;
	char comm[16];
	__u8 original[16]; // the address that was dialled
	__u16 port;
	__u8 ambiguous; // two network namespaces claim the client's address
	__u8 pad[5];
};

// kw_sock is kept with a diverted socket.
struct kw_sock {
	struct kw_who who;
	__u8 diverted[16]; // the address that it was connected to instead
	__u16 port;
	__u8 v6; // of the listener, not of the socket
	__u8 host;
	__u8 pad[4];
};

// kw_flow is a connection to a listener: in one network namespace there is no
// other with the same ends.
struct kw_flow {
	__u8 addr[16]; // the client's own end
	__u16 port;
	__u16 listener; // its port
	__u8 pad[4];
};
