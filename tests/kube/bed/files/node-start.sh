#!/bin/bash
# node-start.sh: starts containerd, the kubelet and kube-proxy on a node that has
# booted. The bed hands it N, the node's folder, L, that of the logs, GROUP, the
# node's control group, PKI, HYPERKUBE, NAME, NODE_IP and KUBECONFIG_FLAGS.
set -eu

# service NAME COMMAND...: in a control group as systemd would give it.
service() {
	local name=$1 group=$GROUP/system.slice/$1.service
	shift
	mkdir -p "$group"
	(
		echo 0 >"$group/cgroup.procs"
		exec "$@" >"$L/$name-$NAME.log" 2>&1
	) &
}

service containerd containerd --config "$N/containerd.toml"
until [ -S /run/containerd/containerd.sock ] && ctr version >/dev/null 2>&1; do sleep 0.05; done
for image in "$N"/images/*.tar; do ctr -n k8s.io images import --snapshotter overlayfs "$image"; done

# shellcheck disable=SC2086 # the flags are several words
service kubelet "$HYPERKUBE" kubelet --config="$N/kubelet.yaml" $KUBECONFIG_FLAGS --hostname-override="$NAME" \
	--node-ip="$NODE_IP" --root-dir=/var/lib/kubelet --v=2
service kube-proxy "$HYPERKUBE" kube-proxy --config="$N/kube-proxy.yaml" --v=2
wait
