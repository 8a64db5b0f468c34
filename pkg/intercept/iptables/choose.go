package iptables

import (
	"bytes"
	"context"
	"fmt"
	"strings"
)

// holding is what the tables of one back end hold besides rules of ours.
type holding struct {
	// rules: any; kube: chains of the kubelet or kube-proxy.
	rules, kube bool
}

// choose picks the back end that the node's other programs use: rules of the
// two back ends cannot be put in order among each other. Legacy only if its
// tables hold rules; that they can be listed says nothing.
func choose(inNFT, inLegacy holding) (b backEnd, why string) {
	switch {
	case inNFT.kube:
		return nft, "the chains of Kubernetes are in the nft tables"
	case inLegacy.kube:
		return legacy, "the chains of Kubernetes are in the legacy tables"
	case inLegacy.rules && !inNFT.rules:
		return legacy, "only the legacy tables hold rules"
	case inNFT.rules:
		return nft, "the nft tables hold rules"
	}
	return nft, "no table holds rules"
}

// holds reads the output of iptables-save.
func holds(save []byte) (h holding) {
	for line := range bytes.Lines(save) {
		f := strings.Fields(string(line))
		switch {
		case len(f) == 0:
		case strings.HasPrefix(f[0], ":KUBE-"):
			h.kube = true
		case f[0] == "-A" && !ours(f[1]) && !ours(f[len(f)-1]):
			h.rules = true
		}
	}
	return h
}

// look asks a back end what it holds, in both families.
func (t tools) look(ctx context.Context) (h holding, err error) {
	for _, one := range []*tool{t.v4, t.v6} {
		if one == nil {
			continue
		}
		out, err := one.save(ctx)
		if err != nil {
			return holding{}, fmt.Errorf("reading the tables of %s: %w", one.name, err)
		}
		in := holds(out)
		h.rules, h.kube = h.rules || in.rules, h.kube || in.kube
	}
	return h, nil
}
