#!/bin/sh
# deps.sh [GROUP...]: installs the Debian packages that the named groups need
# and that are missing. This is the one list of them. Silent when nothing is
# missing; one line when something is installed or cannot be.
#   test  what `make demo` and `make test` need (the default)
#   kube  what `make test-kube` needs besides
#   generate  what `make generate` needs
set -eu
test="iproute2 nftables iptables ipset curl procps"
kube="$test containerd runc containernetworking-plugins conntrack openssl"
generate="clang llvm libbpf-dev linux-libc-dev protobuf-compiler"

want=
for group in "${@:-test}"; do
	case $group in
	test) want="$want $test" ;;
	kube) want="$want $kube" ;;
	generate) want="$want $generate" ;;
	*) echo "deps.sh: unknown group $group (test, kube, generate)" >&2; exit 2 ;;
	esac
done
missing=
for p in $(printf '%s\n' $want | sort -u); do
	dpkg-query -W -f='${db:Status-Status}' "$p" 2>/dev/null | grep -qx installed || missing="$missing $p"
done
[ -n "$missing" ] || exit 0
[ "$(id -u)" = 0 ] || { echo "deps.sh: these Debian packages are missing, and installing them takes root:$missing" >&2; exit 77; }
echo "installing Debian packages:$missing"
export DEBIAN_FRONTEND=noninteractive
log=$(mktemp)
trap 'rm -f "$log"' EXIT
{ apt-get update -qq && apt-get install -y -qq --no-install-recommends $missing; } >"$log" 2>&1 </dev/null || {
	tail -5 "$log" >&2
	echo "deps.sh: apt-get could not install:$missing" >&2
	exit 1
}
