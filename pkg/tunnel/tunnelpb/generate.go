// Package tunnelpb is the wire vocabulary of the tunnel: its protobuf messages,
// and the names and limits that both sides must agree on.
package tunnelpb

// The plugin is built from the module that go.mod names, so that the generated
// file and the library it is compiled with are of one version.

//go:generate go build -o protoc-gen-go google.golang.org/protobuf/cmd/protoc-gen-go
//go:generate protoc --plugin=protoc-gen-go=./protoc-gen-go --go_out=. --go_opt=paths=source_relative tunnel.proto
//go:generate rm protoc-gen-go
