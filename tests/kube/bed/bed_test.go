package bed

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"

	"testing"
	"time"

	"go.uber.org/goleak"
	"go.yaml.in/yaml/v3"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/config"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// every is all kinds of beds that differ in their files.
func every() []*Bed {
	var all []*Bed
	for _, form := range []string{FormProcess, FormStaticPod, FormDaemonSet} {
		for _, dual := range []bool{false, true} {
			for _, mode := range []string{"nft", "ebpf"} {
				all = append(all, New(Config{Proxy: "nftables", Form: form, Mode: mode, DualStack: dual, Nodes: MaxNodes}, Binaries{}))
			}
		}
	}
	return all
}

func TestFilesAreYAML(t *testing.T) {
	names, err := files.ReadDir("files")
	if err != nil {
		t.Fatal(err)
	}
	for _, b := range every() {
		for _, n := range names {
			text, err := render(n.Name(), b.Nodes[1].values())
			if n.Name() == kustomization {
				text, err = render(n.Name(), b.overlay("../base"))
			}
			if err != nil {
				t.Fatal(err)
			}
			if filepath.Ext(n.Name()) == ".sh" || filepath.Ext(n.Name()) == ".toml" {
				continue
			}
			documents := 0
			for dec := yaml.NewDecoder(bytes.NewReader(text)); ; documents++ {
				var v map[string]any
				err := dec.Decode(&v)
				if errors.Is(err, io.EOF) {
					break
				}
				if err != nil {
					t.Fatalf("%s of %s: %v\n%s", n.Name(), b.Name(), err, text)
				}
			}
			if documents == 0 {
				t.Errorf("%s of %s is empty", n.Name(), b.Name())
			}
		}
	}
}

func TestAgentConfig(t *testing.T) {
	for _, b := range every() {
		text, err := render("agent.yaml", b.Nodes[1].values())
		if b.Form == FormDaemonSet {
			text, err = render("agent.yaml", b.overlay("../base"))
		}
		if err != nil {
			t.Fatal(err)
		}
		c, err := config.ParseAgent("agent.yaml", text)
		if err != nil {
			t.Fatalf("%s: %v", b.Name(), err)
		}
		want := 2 // ClusterIP and the KAS's own address
		if b.DualStack {
			want = 4
		}
		if got := len(c.Targets[0].Addresses); got != want {
			t.Errorf("%s: %d addresses, want %d", b.Name(), got, want)
		}
	}
}

func TestLockIsExclusive(t *testing.T) {
	file := filepath.Join(t.TempDir(), "lock")
	unlock, err := lock(file)
	if err != nil {
		t.Fatal(err)
	}
	second := make(chan func(), 1)
	go func() {
		u, err := lock(file)
		if err != nil {
			t.Error(err)
		}
		second <- u
	}()
	select {
	case <-second:
		t.Fatal("two have the lock")
	case <-time.After(100 * time.Millisecond):
	}
	unlock()
	(<-second)()
	if _, err := os.Stat(file); !os.IsNotExist(err) {
		t.Errorf("the file is still there: %v", err)
	}
}

// TestSignalOnlyOurs: a process that has got the pid of one of ours is left alone.
func TestSignalOnlyOurs(t *testing.T) {
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() { _ = cmd.Wait(); close(ended) }()
	_, start := procStat(cmd.Process.Pid)
	for _, p := range []*process{{pid: cmd.Process.Pid, start: "1"}, {pid: cmd.Process.Pid, start: start}} {
		if p.alive() != (p.start == start) {
			t.Errorf("alive is %t for start time %s of %s", p.alive(), p.start, start)
		}
		if err := p.signal(unix.SIGKILL); err != nil {
			t.Fatal(err)
		}
		if p.start == start {
			<-ended
			continue
		}
		select {
		case <-ended:
			t.Fatal("the wrong process was killed")
		case <-time.After(100 * time.Millisecond):
		}
	}
	if err := (&process{pid: cmd.Process.Pid, start: start}).signal(unix.SIGKILL); err != nil {
		t.Errorf("a process that is gone: %v", err)
	}
}

// TestStopAllAfterACrash: what another run has started is ended by its files.
func TestStopAllAfterACrash(t *testing.T) {
	dir := t.TempDir()
	if err := os.Mkdir(filepath.Join(dir, "pid"), 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command("sleep", "60")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	_, start := procStat(cmd.Process.Pid)
	for name, text := range map[string]string{
		"stranger": fmt.Sprintf("%d 0", os.Getpid()), // this process, with another start time
		"ours":     fmt.Sprintf("%d %s", cmd.Process.Pid, start),
	} {
		if err := os.WriteFile(filepath.Join(dir, "pid", name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	if err := stopAll(dir); err != nil {
		t.Fatal(err)
	}
	if state, _ := procStat(cmd.Process.Pid); state != "Z" {
		t.Errorf("the process is in state %q", state)
	}
	_ = cmd.Wait()
}

func TestImage(t *testing.T) {
	dir := t.TempDir()
	program := filepath.Join(dir, "program")
	if err := os.WriteFile(program, []byte("x"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := writeImage("registry.local/x:1", program, filepath.Join(dir, "x.tar")); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(filepath.Join(dir, "x.tar"))
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	names := map[string]bool{}
	for outer := tar.NewReader(f); ; {
		h, err := outer.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		names[h.Name] = true
		if h.Name != "layer.tar" {
			continue
		}
		for inner := tar.NewReader(outer); ; {
			h, err := inner.Next()
			if err != nil {
				break
			}
			names["layer/"+h.Name] = true
		}
	}
	for _, want := range []string{"manifest.json", "layer/program", "layer/tmp/"} {
		if !names[want] {
			t.Errorf("%s is missing of %v", want, names)
		}
	}
}
