//go:build ignore

// SPDX-License-Identifier: GPL-2.0
// The decision of mode ebpf in a program that can be run without a connect: the
// kernel runs no program of the connect hooks for a test.
#include "../types.h"
#include <bpf/bpf_helpers.h>
#include "../decide.h"
#include "../maps.h"

char kw_license[] SEC("license") = "GPL";

// kw_case is what the test sends behind an Ethernet header, and gets back.
struct kw_case {
	struct kw_connect in;
	__u8 addr[16];
	__u16 port;
	// The answer.
	__u16 listener;
	__u32 verdict, target;
	__u32 pad;
};

const struct kw_case *kw_case_type __attribute__((unused));

SEC("tc") int kw_decide_test(struct __sk_buff *skb)
{
	struct kw_case c;
	__u32 zero = 0;
	struct kw_cfg *cfg = bpf_map_lookup_elem(&kw_config, &zero);

	if (!cfg || bpf_skb_load_bytes(skb, 14, &c, sizeof(c)))
		return 1;
	struct kw_target *t = kw_find(c.addr, c.port, c.in.v6);

	c.verdict = KW_PASS;
	c.target = ~0;
	c.listener = 0;
	if (t) {
		c.target = t->index;
		c.verdict = kw_decide(cfg, t, &c.in);
		c.listener = kw_port(t, kw_host(cfg, c.in.netns), c.in.v6);
	}
	return bpf_skb_store_bytes(skb, 14, &c, sizeof(c), 0) ? 2 : 0;
}
