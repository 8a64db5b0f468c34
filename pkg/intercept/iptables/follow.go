package iptables

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"

	"github.com/kasway/kasway/pkg/intercept"
)

// installation is a back end with its tools.
type installation struct {
	back backEnd
	tools
}

// elsewhere is the other back end if kube-proxy has started to use that one
// since the choice was made, as when both start with the node; else nil. Its
// nat hook may come before that of the back end in use, and then takes service
// addresses away from us.
func (m *Mode) elsewhere() (*installation, error) {
	here, err := m.tools.servesKube()
	if err != nil || here {
		return nil, err
	}
	to := other(m.back)
	if to == legacy && !legacyTable("nat") {
		return nil, nil // which looking would make
	}
	there, err := findTools(to, m.run)
	if errors.Is(err, exec.ErrNotFound) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	if serves, err := there.servesKube(); err != nil || !serves {
		return nil, err
	}
	if there.v6 == nil && m.tools.v6 != nil {
		return nil, fmt.Errorf("%w: kube-proxy uses the %s back end, and %s is not installed", intercept.ErrNotSupported, to, toolName(to, true))
	}
	return &installation{to, there}, nil
}

// servesKube says whether kube-proxy translates services with this back end. It
// asks for a chain that is always short.
func (t tools) servesKube() (bool, error) {
	for _, one := range []*tool{t.v4, t.v6} {
		if one == nil {
			continue
		}
		if there, err := one.ipt.ChainExists("nat", "KUBE-POSTROUTING"); err != nil || there {
			return there, err
		}
	}
	return false, nil
}

// legacyTable says whether a table of the legacy back end exists in this
// network namespace.
func legacyTable(name string) bool {
	for _, file := range []string{"ip_tables_names", "ip6_tables_names"} {
		names, err := os.ReadFile("/proc/thread-self/net/" + file)
		if err == nil && slices.Contains(strings.Fields(string(names)), name) {
			return true
		}
	}
	return false
}
