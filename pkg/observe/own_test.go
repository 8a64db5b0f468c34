package observe

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
)

func TestOwnSocket(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	at := func(generation string) string { return generationSocket(path, generation) }
	for _, g := range []string{"old", "new", "dead"} {
		if err := os.WriteFile(at(g), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, c := range map[string]struct {
		pids    map[string]int
		cgroups map[string]string
		want    string
	}{
		"in the old pod":             {map[string]int{"old": 1, "new": 0}, map[string]string{"self": "0::/\n", "1": "0::/\n"}, at("old")},
		"in the old pod, hostPID":    {map[string]int{"old": 7, "new": 8}, map[string]string{"self": "0::/a\n", "7": "0::/a\n", "8": "0::/b\n"}, at("old")},
		"in the new pod, hostPID":    {map[string]int{"old": 7, "new": 8}, map[string]string{"self": "0::/b\n", "7": "0::/a\n", "8": "0::/b\n"}, at("new")},
		"at the node's own terminal": {map[string]int{"old": 7, "new": 8}, map[string]string{"self": "0::/user\n", "7": "0::/a\n", "8": "0::/a\n"}, path},
		"both in one unit":           {map[string]int{"old": 7, "new": 8}, map[string]string{"self": "0::/a\n", "7": "0::/a\n", "8": "0::/a\n"}, path},
		"in a pod without an agent":  {map[string]int{"old": 0, "new": 0}, map[string]string{"self": "0::/\n", "0": "0::/\n"}, path},
		"nothing can be read":        {map[string]int{"old": 7}, nil, path},
	} {
		got := ownSocket(path, func(socket string) (int, error) {
			for g, pid := range c.pids {
				if socket == at(g) {
					return pid, nil
				}
			}
			return 0, errors.New("nobody answers")
		}, func(pid string) (string, error) {
			if text, ok := c.cgroups[pid]; ok {
				return text, nil
			}
			return "", os.ErrNotExist
		})
		if got != c.want {
			t.Errorf("%s: %s, want %s", name, got, c.want)
		}
	}
}

// The real thing, as far as one process shows it: its own socket.
func TestOwnSocket_Here(t *testing.T) {
	path := filepath.Join(t.TempDir(), "agent.sock")
	l, _, err := TakeOver(path, "g1")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	if got := OwnSocket(path); got != generationSocket(path, "g1") {
		t.Errorf("own socket %s", got)
	}
	second, _, err := TakeOver(path, "g2")
	if err != nil {
		t.Fatal(err)
	}
	defer second.Close()
	if got := OwnSocket(path); got != path {
		t.Errorf("of two the own one is %s", got)
	}
}
