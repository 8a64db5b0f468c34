module github.com/kasway/kasway/hack/tools

go 1.26.0

tool (
	github.com/cilium/ebpf/cmd/bpf2go
	github.com/client9/misspell/cmd/misspell
	github.com/kisielk/errcheck
	github.com/polyfloyd/go-errorlint
	google.golang.org/grpc/cmd/protoc-gen-go-grpc
	google.golang.org/protobuf/cmd/protoc-gen-go
	honnef.co/go/tools/cmd/staticcheck
)

require (
	github.com/BurntSushi/toml v1.6.0 // indirect
	github.com/cilium/ebpf v0.22.0 // indirect
	github.com/client9/misspell v0.3.4 // indirect
	github.com/kisielk/errcheck v1.30.0 // indirect
	github.com/polyfloyd/go-errorlint v1.8.0 // indirect
	golang.org/x/exp/typeparams v0.0.0-20260209203927-2842357ff358 // indirect
	golang.org/x/mod v0.41.0 // indirect
	golang.org/x/sync v0.23.0 // indirect
	golang.org/x/sys v0.48.0 // indirect
	golang.org/x/tools v0.51.0 // indirect
	google.golang.org/grpc/cmd/protoc-gen-go-grpc v1.6.2 // indirect
	google.golang.org/protobuf v1.36.12 // indirect
	honnef.co/go/tools v0.8.2 // indirect
)
