// SPDX-License-Identifier: GPL-2.0
// What happens to one connect. This is the whole decision: nothing else in the
// kernel or in the agent has a say in it. rules.State.Match is its twin in Go, and
// a test proves them equal.
#pragma once
#include "types.h"

// kw_host tells a process of the host from one of a pod.
static __always_inline int kw_host(const struct kw_cfg *c, __u64 netns)
{
	return netns == c->host_netns;
}

// kw_port is the port of a listener; 0: there is none. All are read, at fixed
// offsets: the verifier allows no others to who has CAP_BPF, and not CAP_PERFMON.
static __always_inline __u16 kw_port(const struct kw_target *t, int host, int v6)
{
	volatile const __u16 *p = t->port;
	__u16 host4 = p[0], host6 = p[1], pod4 = p[2], pod6 = p[3];

	return host ? (v6 ? host6 : host4) : (v6 ? pod6 : pod4);
}

// kw_decide returns a verdict about a connect to a target's address t. It reads
// nothing but its arguments.
static __always_inline enum kw_verdict kw_decide(const struct kw_cfg *c, const struct kw_target *t,
						 const struct kw_connect *in)
{
	int host = kw_host(c, in->netns);

	// Our own, by cookie or by mark: what we carry must not come back to us. In a
	// network namespace of his own anybody can set any mark.
	if (in->own)
		return KW_OWN;
	if (host && c->mark_mask && (in->mark & c->mark_mask) == c->mark)
		return KW_OWN;
	if (host ? !c->host : !c->pods)
		return KW_PASS;
	// Bound to a device, a socket of the host cannot reach lo.
	if (host && in->bound_dev)
		return KW_DEVICE;
	// A dead or frozen agent: by its setting.
	if (in->now - in->beat > c->max_age)
		return c->refuse_when_down ? KW_STALE_REFUSED : KW_STALE_PASSED;
	if (t->refused)
		return KW_REFUSED;
	if (!kw_port(t, host, in->v6))
		return KW_PASS; // no listener of that family
	return KW_DIVERTED;
}
