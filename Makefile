# Kasway. `make help` lists the targets. Everything runs as root: the tests make
# network namespaces, and the product lives in the kernel.

GO := $(firstword $(shell command -v go 2>/dev/null) $(wildcard /usr/local/go/bin/go /usr/lib/go/bin/go /usr/lib/go-1.*/bin/go $(HOME)/go/bin/go /snap/bin/go))
export PATH := $(if $(GO),$(dir $(GO)):)$(PATH):/usr/sbin:/sbin
export GOFLAGS += -mod=readonly

VERSION ?= $(shell git describe --tags --always --dirty 2>/dev/null || echo unknown)
LDFLAGS := -s -w -X github.com/kasway/kasway/pkg/observe.Version=$(VERSION)
BUILD   := CGO_ENABLED=0 $(GO) build -trimpath -ldflags '$(LDFLAGS)'
TOOL    := $(GO) tool -modfile=hack/tools/go.mod
TESTSUM := $(GO) run ./hack/testsum

# Tests that need a privilege fail instead of being skipped where it is missing.
export REQUIRE_PRIV := 1

.DEFAULT_GOAL := help
.PHONY: help go root deps build demo test test-netns kube-build test-kube chaos bench-intercept mutants generate lint image clean

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-16s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

go:
	@$(if $(GO),true,echo "make: Go is not installed here: https://go.dev/dl (1.26 or newer)" >&2; exit 1)

root: go
	@[ "$$(id -u)" = 0 ] || { echo "make: this target makes network namespaces: run it as root" >&2; exit 77; }

deps: root
	@hack/deps.sh test

build: go ## bin/kasway-agent and bin/kasway-server, static
	@$(BUILD) -o bin/kasway-agent ./cmd/agent
	@$(BUILD) -o bin/kasway-server ./cmd/server

demo: deps build ## the main job, shown step by step in network namespaces (seconds, once built)
	@$(GO) run ./tests/netns/demo -bin bin

test: deps ## every test but test-kube, with the race detector (about five minutes)
	@$(TESTSUM) -race -count=1 -timeout 10m ./...

test-netns: deps ## the conformance matrix of the modes, as a table
	@$(TESTSUM) -race -count=1 -timeout 10m ./pkg/intercept/... ./tests/netns/...

kube-build: go ## the Kubernetes of test-kube, kept in ~/.cache (seven minutes when it is new)
	@tests/kube/build.sh

test-kube: root ## a real Kubernetes whose node reaches its KAS through Kasway
	@hack/deps.sh kube
	@$(MAKE) --no-print-directory build
	@$(TESTSUM) -tags kube -count=1 -timeout 60m ./tests/kube ./tests/deploy/kustomize

chaos: deps ## the agent killed, frozen and restarted under load, in every mode (three minutes)
	@$(TESTSUM) -tags chaos -count=1 -timeout 20m -parallel 4 ./tests/chaos

bench-intercept: deps ## what each mode costs a connect, beside none (ROUNDS=15; minutes)
	@$(GO) run ./tests/bench/intercept -rounds $(or $(ROUNDS),15)

mutants: deps ## small faults that the tests must notice (FULL=1: all of them)
	@$(GO) run ./tests/mutants

generate: root ## generated files, anew: protobuf and BPF
	@hack/deps.sh generate
	@PATH="$(CURDIR)/bin/tools:$$PATH" && export PATH && mkdir -p bin/tools && \
	 $(GO) build -modfile=hack/tools/go.mod -o bin/tools/ google.golang.org/protobuf/cmd/protoc-gen-go google.golang.org/grpc/cmd/protoc-gen-go-grpc github.com/cilium/ebpf/cmd/bpf2go && \
	 BPF2GO_CFLAGS="-O2 -g -Wall -Werror -I/usr/include/$$(uname -m)-linux-gnu" $(GO) generate ./...

lint: go ## gofmt, vet, staticcheck, errcheck, errorlint, misspell, go mod tidy
	@hack/lint.sh "$(TOOL)"

image: go ## container image archives under out/, for amd64 and arm64, without an engine
	@$(GO) run ./hack/image -version $(VERSION) -o out

clean: ## what the targets above left in this folder
	@rm -rf bin out bench
