#!/bin/sh
# lint.sh TOOL: every linter over the whole tree. TOOL runs a tool of hack/tools.
set -u
tool=$1
failed=0
say() { # say NAME OUTPUT: a linter that printed something has failed
	[ -z "$2" ] && return
	printf -- '--- %s\n%s\n' "$1" "$2"
	failed=1
}
say gofmt "$(git ls-files -co --exclude-standard '*.go' | xargs gofmt -l 2>&1)"
for tags in '' kube,chaos; do
	say "go vet $tags" "$(go vet -tags "$tags" ./... 2>&1 | grep -v '^#')"
	say "staticcheck $tags" "$($tool staticcheck -tags "$tags" ./... 2>&1)"
	say "errcheck $tags" "$($tool errcheck -tags "$tags" -exclude hack/errcheck.txt ./... 2>&1)"
done
say errorlint "$($tool go-errorlint ./... 2>&1)"
say misspell "$(git ls-files -co --exclude-standard '*.go' '*.md' '*.sh' '*.yaml' Makefile | xargs $tool misspell 2>&1)"
say 'go mod tidy' "$(go mod tidy -diff 2>&1)"
[ $failed = 0 ] && echo 'lint: ok'
exit $failed
