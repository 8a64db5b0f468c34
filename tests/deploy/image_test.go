package deploy

import (
	"bytes"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/kasway/kasway/tests/netns"
	"github.com/kasway/kasway/tests/netns/stack"
)

// imageRoot is an image as a runtime unpacks it.
type imageRoot struct {
	dir    string
	config v1.Config
}

// archive makes the image of a binary for this machine, as `make image` does,
// and returns its path.
func archive(dir, binary string) (string, error) {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return "", err
	}
	_, err = goTool("run", "./hack/image", "-arch", runtime.GOARCH, "-binary", binary, "-version", "v0-test", "-o", dir)
	return filepath.Join(dir, binary+"_"+runtime.GOARCH+".tar"), err
}

func makeImage(dir, binary string) (r imageRoot, err error) {
	path, err := archive(dir, binary)
	if err != nil {
		return r, err
	}
	img, err := tarball.ImageFromPath(path, nil)
	if err != nil {
		return r, err
	}
	file, err := img.ConfigFile()
	if err != nil {
		return r, err
	}
	if file.Architecture != runtime.GOARCH {
		return r, fmt.Errorf("%s is for %s, want %s", path, file.Architecture, runtime.GOARCH)
	}
	r = imageRoot{filepath.Join(dir, binary), file.Config}
	if err := os.MkdirAll(r.dir, 0o755); err != nil {
		return r, err
	}
	files := mutate.Extract(img)
	defer files.Close()
	cmd := exec.Command("tar", "-x", "-C", r.dir)
	cmd.Stdin = files
	if out, err := cmd.CombinedOutput(); err != nil {
		return r, fmt.Errorf("unpacking %s: %w: %s", path, err, out)
	}
	return r, nil
}

func imageOf(t *testing.T, binary string) imageRoot {
	t.Helper()
	netns.Require(t)
	r, err := made.images[binary]()
	if err != nil {
		t.Fatal(err)
	}
	return r
}

func lab(t *testing.T) *netns.Lab {
	t.Helper()
	l, err := netns.Open()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	})
	return l
}

// Same sources and packages, same bytes.
func TestImage_SameBytes(t *testing.T) {
	t.Parallel()
	netns.Require(t)
	var first []byte
	for _, dir := range []string{t.TempDir(), t.TempDir()} {
		path, err := archive(dir, "kasway-agent")
		if err != nil {
			t.Fatal(err)
		}
		got, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		if first == nil {
			first = got
		} else if !bytes.Equal(first, got) {
			t.Error("two archives of the same sources differ")
		}
	}
}

// Every tool of the image runs with nothing but the image around it: loader,
// libraries and extensions are found.
func TestImage_ToolsRun(t *testing.T) {
	t.Parallel()
	image := imageOf(t, "kasway-agent")
	host, err := lab(t).Host("bare")
	if err != nil {
		t.Fatal(err)
	}
	inImage := func(argv ...string) string {
		t.Helper()
		c, err := spec{Root: image.dir, ReadOnly: true, Argv: argv, Env: image.config.Env,
			Capabilities: []string{"NET_ADMIN", "NET_RAW"}, NoNewPrivileges: true}.command(host)
		if err != nil {
			t.Fatal(err)
		}
		code, out, err := stack.ExitOf(c)
		if err != nil || code != 0 {
			t.Errorf("%v exits %d (%v):\n%s", argv, code, err, out)
		}
		return out
	}
	for tool, back := range map[string]string{
		"iptables": "nf_tables", "iptables-nft": "nf_tables", "iptables-legacy": "legacy",
		"ip6tables": "nf_tables", "ip6tables-nft": "nf_tables", "ip6tables-legacy": "legacy",
	} {
		for _, verb := range []string{"", "-save", "-restore"} {
			out := inImage("/usr/sbin/"+tool+verb, "--version")
			if !strings.Contains(out, "("+back+")") {
				t.Errorf("%s%s is %q, want the %s back end", tool, verb, strings.TrimSpace(out), back)
			}
		}
	}
	for _, match := range []string{"set", "conntrack", "mark", "addrtype", "comment"} {
		inImage("/usr/sbin/iptables-nft", "-m", match, "--help") // fails where its library is missing
	}
	if out := inImage("/kasway-agent", "version"); !strings.Contains(out, "v0-test") {
		t.Errorf("the agent says %q, want the version that it was built with", out)
	}
}

// Nothing in an image gives rights, nothing dangles, and all of it says under
// which terms it may be used.
func TestImage_Contents(t *testing.T) {
	t.Parallel()
	for _, binary := range []string{"kasway-agent", "kasway-server"} {
		image := imageOf(t, binary)
		// Containers of other tests leave empty mount points.
		err := filepath.WalkDir(image.dir, func(path string, d fs.DirEntry, err error) error {
			if err != nil {
				return err
			}
			info, err := d.Info()
			if err != nil {
				return err
			}
			if m := info.Mode(); m&(fs.ModeSetuid|fs.ModeSetgid) != 0 || m.Type() == 0 && m.Perm()&0o022 != 0 {
				t.Errorf("%s has mode %v", path, m)
			}
			if info.Mode().Type() == fs.ModeSymlink {
				if _, err := os.Stat(resolve(image.dir, path)); err != nil {
					t.Errorf("%s leads nowhere: %v", path, err)
				}
			}
			return nil
		})
		if err != nil {
			t.Fatal(err)
		}
		docs := filepath.Join(image.dir, "usr/share/doc")
		packages, err := filepath.Glob(filepath.Join(image.dir, "var/lib/dpkg/status.d/*"))
		if err != nil || binary == "kasway-agent" && len(packages) == 0 {
			t.Errorf("no list of packages is in the image (%v)", err)
		}
		for _, p := range packages {
			if _, err := os.Stat(filepath.Join(docs, filepath.Base(p), "copyright")); err != nil {
				t.Error(err)
			}
		}
		for _, module := range []string{"github.com/kasway/kasway", "google.golang.org/grpc", "go"} {
			if _, err := os.Stat(filepath.Join(docs, binary, module, "LICENSE")); err != nil {
				t.Error(err)
			}
		}
	}
}

// resolve is where a link within root leads, if it is one step.
func resolve(root, link string) string {
	to, err := os.Readlink(link)
	if err != nil {
		return link
	}
	if filepath.IsAbs(to) {
		return filepath.Join(root, to)
	}
	return filepath.Join(filepath.Dir(link), to)
}
