#!/bin/bash
# node-init.sh: the first process of a node, in network, mount and pid namespaces
# of the node's own: when it ends, every container ends and every mount is gone.
# The bed hands it DIR, PKI, HYPERKUBE, NAME, NODE_IP and KUBECONFIG_FLAGS.
set -eu
N=$DIR/node L=$DIR/log

# Nothing of the machine's own is touched.
for d in /var/lib /var/log /run; do mount -t tmpfs -o mode=755 tmpfs $d; done
mkdir -p /var/lib/{containerd,kubelet,cni} /run/containerd /var/log/{pods,containers} "$N"/{containerd,kubelet,pods}
# Overlays want a disk; what the tests read, a path that the bed has too.
mount --bind "$N/containerd" /var/lib/containerd
mount --bind "$N/pods" /var/log/pods
mount --bind "$N/kubelet" /var/lib/kubelet
mount --make-shared /var/lib/kubelet
# The kubelet sets these for the whole machine: it is shown files of its own that
# hold its values already.
mkdir "$N/sys"
while read -r file value; do
	echo "$value" >"$N/sys/${file##*/}"
	mount --bind "$N/sys/${file##*/}" "/proc/sys/$file"
done <<-SYSCTLS
	vm/overcommit_memory 1
	vm/panic_on_oom 0
	kernel/panic 10
	kernel/panic_on_oops 1
SYSCTLS

containerd --config "$N/containerd.toml" >"$L/containerd.log" 2>&1 &
until [ -S /run/containerd/containerd.sock ] && ctr version >/dev/null 2>&1; do sleep 0.05; done
for image in "$N"/images/*.tar; do ctr -n k8s.io images import --snapshotter overlayfs "$image"; done

# shellcheck disable=SC2086 # the flags are several words
"$HYPERKUBE" kubelet --config="$N/kubelet.yaml" $KUBECONFIG_FLAGS --hostname-override="$NAME" --node-ip="$NODE_IP" \
	--root-dir=/var/lib/kubelet --v=2 >"$L/kubelet.log" 2>&1 &
"$HYPERKUBE" kube-proxy --config="$N/kube-proxy.yaml" --v=2 >"$L/kube-proxy.log" 2>&1 &
# wait reaps what containers leave behind, too; kubelet and kube-proxy stay.
wait
