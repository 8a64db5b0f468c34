//go:build ignore

// SPDX-License-Identifier: GPL-2.0
// The programs on the cgroup's hooks: connect4 and connect6 divert or refuse,
// getpeername4 and getpeername6 show the address that was dialled, sockops tells
// the agent who connected. Only uapi headers are needed: what they read is stable.
#include "types.h"
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include "decide.h"
#include "maps.h"

char kw_license[] SEC("license") = "GPL";

// Whether the kernel has bpf_set_retval (5.18); set before loading.
volatile const __u8 kw_has_retval = 1;

// For the generator of the Go types, which reads what the compiler kept.
const struct kw_key *kw_key_type __attribute__((unused));
const struct kw_target *kw_target_type __attribute__((unused));
const enum kw_verdict *kw_verdict_type __attribute__((unused));

// One load each, never merged by the compiler: the verifier knows the context's
// fields only by their exact offsets.
#define READ(x) (*(volatile typeof(x) *)&(x))
#define READ6(x) { READ((x)[0]), READ((x)[1]), READ((x)[2]), READ((x)[3]) }
// And one store each: two that are neighbours would become one of 8 bytes.
#define WRITE(x, v) (*(volatile typeof(x) *)&(x) = (v))
static __always_inline void kw_write6(struct bpf_sock_addr *ctx, const __u8 *from, __u16 port)
{
	__u32 a[4];

	__builtin_memcpy(a, from, 16);
#pragma unroll
	for (int i = 0; i < 4; i++)
		WRITE(ctx->user_ip6[i], a[i]);
	WRITE(ctx->user_port, port);
}

static __always_inline void kw_write4(struct bpf_sock_addr *ctx, const __u8 *from, __u16 port)
{
	__u32 ip;

	__builtin_memcpy(&ip, from + 12, 4);
	WRITE(ctx->user_ip4, ip);
	WRITE(ctx->user_port, port);
}

#define PASS 1
#define REFUSE 0
#define ECONNREFUSED 111
#define SOCK_STREAM 1

// kw_dst is what a client dials.
struct kw_dst {
	__u8 addr[16];
	__u16 port;
};

static __always_inline void kw_mapped(__u8 *to, __u32 v4)
{
	__builtin_memset(to, 0, 10);
	to[10] = to[11] = 0xff;
	__builtin_memcpy(to + 12, &v4, 4);
}

static __always_inline void kw_count(const struct kw_target *t, int host, enum kw_verdict v)
{
	__u32 index = t->index < KW_COUNTED ? t->index : KW_COUNTED;
	__u32 i = (index * 2 + (host ? 0 : 1)) * KW_VERDICTS + v;
	__u64 *n = bpf_map_lookup_elem(&kw_counts, &i);

	if (n)
		(*n)++; // per CPU
}

// kw_remember keeps who connects with the socket, until sockops knows its port.
static __always_inline void kw_remember(struct bpf_sock *sk, const struct kw_dst *k, const __u8 *to,
					__u16 port, __u64 netns, int host, int v6)
{
	struct kw_sock *s = bpf_sk_storage_get(&kw_socks, sk, 0, BPF_SK_STORAGE_GET_F_CREATE);

	if (!s)
		return; // attribution is lost, which the agent counts
	s->who.netns = netns;
	s->who.cgroup = bpf_get_current_cgroup_id();
	s->who.pid = bpf_get_current_pid_tgid() >> 32;
	s->who.uid = bpf_get_current_uid_gid();
	bpf_get_current_comm(s->who.comm, sizeof(s->who.comm));
	__builtin_memcpy(s->who.original, k->addr, 16);
	s->who.port = k->port;
	s->who.ambiguous = 0;
	__builtin_memcpy(s->diverted, to, 16);
	s->port = port;
	s->v6 = v6;
	s->host = host;
}

// kw_node is the address that pods are diverted to. Both are read, at fixed
// offsets: the verifier allows no others to who has CAP_BPF, and not CAP_PERFMON.
static __always_inline void kw_node(const struct kw_cfg *c, int v6, __u8 *to)
{
	__u32 a[4] = READ6((const __u32 *)c->node4), b[4] = READ6((const __u32 *)c->node6);

#pragma unroll
	for (int i = 0; i < 4; i++)
		a[i] = v6 ? b[i] : a[i];
	__builtin_memcpy(to, a, 16);
}

// kw_judge decides about a connect to k and says where it goes instead. to is
// the loopback address of its family until it is a pod's.
static __always_inline enum kw_verdict kw_judge(struct bpf_sock_addr *ctx, struct bpf_sock *sk, const struct kw_dst *k,
						int v6, __u8 *to, __u16 *port)
{
	struct kw_target *t = kw_find(k->addr, k->port, v6);
	__u32 zero = 0;

	if (!t || !sk)
		return KW_PASS;
	struct kw_cfg *c = bpf_map_lookup_elem(&kw_config, &zero);
	__u64 *beat = bpf_map_lookup_elem(&kw_beat, &zero);

	if (!c || !beat)
		return KW_PASS;
	__u64 cookie = bpf_get_socket_cookie(ctx);
	struct kw_connect in = {
		.netns = bpf_get_netns_cookie(ctx), .beat = *beat, .now = bpf_ktime_get_ns(),
		.mark = READ(sk->mark), .bound_dev = READ(sk->bound_dev_if), .v6 = v6,
		.own = bpf_map_lookup_elem(&kw_own, &cookie) != 0,
	};
	// A beat between the two reads is newer than now.
	if (in.beat > in.now)
		in.now = in.beat;
	enum kw_verdict v = kw_decide(c, t, &in);
	int host = kw_host(c, in.netns);

	if (v == KW_OWN && c->learn)
		bpf_map_update_elem(&kw_learnt, &zero, &in.netns, BPF_ANY);
	kw_count(t, host, v);
	// A refusal that has to be sent somewhere stays within the pod: on the way to
	// the node a policy might swallow it. Bound to a device, it cannot.
	if (!host && (v == KW_DIVERTED || in.bound_dev))
		kw_node(c, v6, to);
	*port = kw_port(t, host, v6);
	if (v == KW_DIVERTED)
		kw_remember(sk, k, to, *port, in.netns, host, v6);
	return v;
}

// kw_rewrites tells whether connect goes on to another address; if not, ret is
// what the program returns. A refusal is ECONNREFUSED: where the program cannot
// say so itself, it sends connect to port 0, on which nobody can listen.
static __always_inline int kw_rewrites(enum kw_verdict v, __u16 *port, int *ret)
{
	int refused = v == KW_REFUSED || v == KW_STALE_REFUSED;

	*ret = PASS;
	if (refused && kw_has_retval) {
		bpf_set_retval(-ECONNREFUSED);
		*ret = REFUSE;
		return 0;
	}
	if (refused)
		*port = 0;
	return refused || v == KW_DIVERTED;
}

SEC("cgroup/connect4") int kw_connect4(struct bpf_sock_addr *ctx)
{
	__u32 type = READ(ctx->type), addr = READ(ctx->user_ip4), dport = READ(ctx->user_port);
	struct bpf_sock *sk = ctx->sk;
	struct kw_dst k = { .port = dport };
	__u8 to[16];
	__u16 port = 0;
	int ret;

	if (type != SOCK_STREAM)
		return PASS;
	kw_mapped(k.addr, addr);
	kw_mapped(to, bpf_htonl(INADDR_LOOPBACK));
	if (!kw_rewrites(kw_judge(ctx, sk, &k, 0, to, &port), &port, &ret))
		return ret;
	kw_write4(ctx, to, port);
	return PASS;
}

SEC("cgroup/connect6") int kw_connect6(struct bpf_sock_addr *ctx)
{
	__u32 type = READ(ctx->type), dport = READ(ctx->user_port);
	__u32 a[4] = READ6(ctx->user_ip6);
	struct bpf_sock *sk = ctx->sk;
	struct kw_dst k = { .port = dport };
	int v6 = a[0] || a[1] || a[2] != bpf_htonl(0xffff);
	__u8 to[16] = {};
	__u16 port = 0;
	int ret;

	if (type != SOCK_STREAM)
		return PASS;
	__builtin_memcpy(k.addr, a, 16);
	if (v6)
		to[15] = 1; // ::1
	else
		kw_mapped(to, bpf_htonl(INADDR_LOOPBACK));
	if (!kw_rewrites(kw_judge(ctx, sk, &k, v6, to, &port), &port, &ret))
		return ret;
	kw_write6(ctx, to, port);
	return PASS;
}

// kw_peer is what is known of a socket that is still connected where we sent it.
static __always_inline struct kw_sock *kw_peer(struct bpf_sock *sk, const __u8 *addr, __u16 port)
{
	struct kw_sock *s = sk ? bpf_sk_storage_get(&kw_socks, sk, 0, 0) : 0;

	if (!s || s->port != port)
		return 0;
	for (int i = 0; i < 16; i++)
		if (s->diverted[i] != addr[i])
			return 0;
	return s;
}

SEC("cgroup/getpeername4") int kw_getpeername4(struct bpf_sock_addr *ctx)
{
	__u32 ip = READ(ctx->user_ip4), dport = READ(ctx->user_port);
	struct bpf_sock *sk = ctx->sk;
	__u8 addr[16];

	kw_mapped(addr, ip);
	struct kw_sock *s = kw_peer(sk, addr, dport);

	if (s)
		kw_write4(ctx, s->who.original, s->who.port);
	return PASS;
}

SEC("cgroup/getpeername6") int kw_getpeername6(struct bpf_sock_addr *ctx)
{
	__u32 a[4] = READ6(ctx->user_ip6);
	__u32 dport = READ(ctx->user_port);
	struct bpf_sock *sk = ctx->sk;
	__u8 addr[16];

	__builtin_memcpy(addr, a, 16);
	struct kw_sock *s = kw_peer(sk, addr, dport);

	if (s)
		kw_write6(ctx, s->who.original, s->who.port);
	return PASS;
}

// kw_publish lets the agent find w by the client's address. What another network
// namespace has claimed is nobody's: a pod can make the answer "unknown", never
// a lie.
static __always_inline void kw_publish(void *flows, struct kw_flow *f, struct kw_who *w)
{
	struct kw_who *other = bpf_map_lookup_elem(flows, f);

	if (!other && !bpf_map_update_elem(flows, f, w, BPF_NOEXIST))
		return;
	if (!other)
		other = bpf_map_lookup_elem(flows, f); // somebody was quicker
	if (!other)
		return;
	if (other->netns != w->netns) {
		other->ambiguous = 1;
		return;
	}
	// The same namespace uses its port again. What was claimed by two stays so
	// until the agent takes it out: the entry is written, never replaced.
	other->cgroup = w->cgroup;
	other->pid = w->pid;
	other->uid = w->uid;
	__builtin_memcpy(other->comm, w->comm, sizeof(w->comm));
	__builtin_memcpy(other->original, w->original, 16);
	other->port = w->port;
}

SEC("sockops") int kw_sockops(struct bpf_sock_ops *ctx)
{
	__u32 op = READ(ctx->op), ip = READ(ctx->local_ip4), port = READ(ctx->local_port);
	__u32 a[4] = READ6(ctx->local_ip6), rport = READ(ctx->remote_port);
	struct bpf_sock *sk = ctx->sk;
	struct kw_flow f = {};

	if (op != BPF_SOCK_OPS_TCP_CONNECT_CB || !sk)
		return PASS;
	struct kw_sock *s = bpf_sk_storage_get(&kw_socks, sk, 0, 0);

	if (!s || s->port != bpf_htons(bpf_ntohl(rport)))
		return PASS; // not diverted, or not this time
	if (s->v6)
		__builtin_memcpy(f.addr, a, 16);
	else
		kw_mapped(f.addr, ip);
	f.port = bpf_htons(port);
	f.listener = s->port;
	kw_publish(s->host ? (void *)&kw_flows_host : &kw_flows_pod, &f, &s->who);
	return PASS;
}
