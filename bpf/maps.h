// SPDX-License-Identifier: GPL-2.0
// The maps. All of them are bounded, and none decides anything but kw_targets,
// kw_config and kw_beat, which only the agent writes.
#pragma once

#define KW_TARGETS 4096

struct kw_trie {
	__uint(type, BPF_MAP_TYPE_LPM_TRIE);
	__uint(max_entries, KW_TARGETS);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__uint(key_size, sizeof(struct kw_key));
	__uint(value_size, sizeof(struct kw_target));
};

// The one trie in force: replaced whole, so that no connect sees half of a change.
struct {
	__uint(type, BPF_MAP_TYPE_ARRAY_OF_MAPS);
	__uint(max_entries, 1);
	__type(key, __u32);
	__array(values, struct kw_trie);
} kw_targets SEC(".maps");

// kw_find is the one lookup by which a destination becomes a target.
static __always_inline struct kw_target *kw_find(const __u8 *addr, __u16 port, int v6)
{
	struct kw_key k = { .bits = (sizeof(k) - sizeof(k.bits)) * 8, .port = port, .v6 = v6 };
	__u32 zero = 0;

	__builtin_memcpy(k.addr, addr, 16);
	void *trie = bpf_map_lookup_elem(&kw_targets, &zero);

	return trie ? bpf_map_lookup_elem(trie, &k) : 0;
}

#define KW_MAP(name, kind, key_type, value_type, entries) \
	struct {                                          \
		__uint(type, kind);                       \
		__uint(max_entries, entries);             \
		__type(key, key_type);                    \
		__type(value, value_type);                \
	} name SEC(".maps")

KW_MAP(kw_config, BPF_MAP_TYPE_ARRAY, __u32, struct kw_cfg, 1);
KW_MAP(kw_beat, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1); // CLOCK_MONOTONIC, ns
KW_MAP(kw_learnt, BPF_MAP_TYPE_ARRAY, __u32, __u64, 1);
KW_MAP(kw_own, BPF_MAP_TYPE_LRU_HASH, __u64, __u8, 1024); // cookies of the agent's sockets
KW_MAP(kw_counts, BPF_MAP_TYPE_PERCPU_ARRAY, __u32, __u64, (KW_COUNTED + 1) * 2 * KW_VERDICTS);
// Two, so that pods cannot flush the host's.
KW_MAP(kw_flows_host, BPF_MAP_TYPE_LRU_HASH, struct kw_flow, struct kw_who, 16384);
KW_MAP(kw_flows_pod, BPF_MAP_TYPE_LRU_HASH, struct kw_flow, struct kw_who, 16384);

struct {
	__uint(type, BPF_MAP_TYPE_SK_STORAGE);
	__uint(map_flags, BPF_F_NO_PREALLOC);
	__type(key, int);
	__type(value, struct kw_sock);
} kw_socks SEC(".maps");
