#!/bin/bash
# node-boot.sh: the first process of a node, in namespaces of the node's own: when
# it ends, every process and container of the node ends, and every mount is gone.
# The bed hands it N, the node's folder, and NAME.
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
# The kubelet sets these for the whole machine: it is shown files of its own that
# hold its values already.
while read -r file value; do
	echo "$value" >"$N/sys/${file##*/}"
	mount --bind "$N/sys/${file##*/}" "/proc/sys/$file"
done <<-SYSCTLS
	vm/overcommit_memory 1
	vm/panic_on_oom 0
	kernel/panic 10
	kernel/panic_on_oops 1
SYSCTLS
# As systemd does: pods are shown what is mounted later, too.
mount --make-rshared /
hostname "$NAME"
touch "$N/booted"
# wait reaps what containers leave behind, too.
sleep infinity &
wait
