#!/bin/bash
# node-boot.sh: what the processes of a node find, and nobody else: mounts and a
# host name, in namespaces that end with this process. The bed hands it N, the
# node's folder, and NAME.
set -eu
# Nothing of the machine's own is touched.
for d in /var/lib /var/log /run; do mount -t tmpfs -o mode=755 tmpfs $d; done
mkdir -p /var/lib/{containerd,kubelet,cni} /run/containerd /var/log/{pods,containers}
# Overlays want a disk; what the tests read, a path that the bed has too.
mount --bind "$N/containerd" /var/lib/containerd
mount --bind "$N/pods" /var/log/pods
mount --bind "$N/kubelet" /var/lib/kubelet
# As systemd does: what is pinned here outlives the agent, and not the node.
mount -t bpf -o mode=700 bpf /sys/fs/bpf
hostname "$NAME"
touch "$N/booted"
exec sleep infinity
