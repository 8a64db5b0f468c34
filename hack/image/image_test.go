package main

import (
	"archive/tar"
	"debug/elf"
	"errors"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/validate"
)

// tree writes the files in the order given, as they are to look in every image.
func tree(t *testing.T, files ...string) string {
	t.Helper()
	root := t.TempDir()
	for _, f := range files {
		path := filepath.Join(root, f)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(f), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func digest(t *testing.T, root string) v1.Hash {
	t.Helper()
	l, err := layerOf(root)
	if err != nil {
		t.Fatal(err)
	}
	h, err := l.Digest()
	if err != nil {
		t.Fatal(err)
	}
	return h
}

// headers lists what is in the layer, in its order.
func headers(t *testing.T, l v1.Layer) (all []*tar.Header) {
	t.Helper()
	stream, err := l.Uncompressed()
	if err != nil {
		t.Fatal(err)
	}
	defer stream.Close()
	for r := tar.NewReader(stream); ; {
		h, err := r.Next()
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatal(err)
		}
		all = append(all, h)
	}
}

// The same files make the same bytes, whenever, in which order and by whomever
// they were written.
func TestLayer_SameBytes(t *testing.T) {
	a := tree(t, "usr/sbin/tool", "a", "usr/lib/x.so")
	b := tree(t, "usr/lib/x.so", "a", "usr/sbin/tool")
	for _, root := range []string{a, b} {
		if err := os.Symlink("usr/lib", filepath.Join(root, "lib")); err != nil {
			t.Fatal(err)
		}
	}
	old := time.Unix(1e9, 0)
	for _, err := range []error{
		os.Chtimes(filepath.Join(b, "a"), old, old), os.Chtimes(filepath.Join(b, "usr"), old, old),
		os.Chmod(filepath.Join(b, "a"), 0o664), os.Chmod(filepath.Join(b, "usr"), 0o755),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if da, db := digest(t, a), digest(t, b); da != db {
		t.Errorf("the same files make layers %s and %s", da, db)
	}
	if err := os.WriteFile(filepath.Join(b, "a"), []byte("b"), 0o600); err != nil {
		t.Fatal(err)
	}
	if digest(t, a) == digest(t, b) {
		t.Error("other files make the same layer")
	}
}

// No file of a layer gives its user another's rights, or is anybody's but root's.
func TestLayer_PlainRights(t *testing.T) {
	root := tree(t, "program", "text")
	if err := os.Chmod(filepath.Join(root, "program"), 0o755|fs.ModeSetuid|fs.ModeSetgid); err != nil {
		t.Fatal(err)
	}
	// Without privilege nothing is owned by another; then mode is what counts.
	_ = os.Chown(filepath.Join(root, "text"), 12, 34)
	l, err := layerOf(root)
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int64{"program": 0o755, "text": 0o644}
	for _, h := range headers(t, l) {
		if h.Mode != want[h.Name] || h.Uid != 0 || h.Gid != 0 || h.Uname != "" {
			t.Errorf("%s has mode %o and belongs to %d:%d %q, want %o and root", h.Name, h.Mode, h.Uid, h.Gid, h.Uname, want[h.Name])
		}
		delete(want, h.Name)
	}
	if len(want) > 0 {
		t.Errorf("not in the layer: %v", want)
	}
}

func TestAssemble(t *testing.T) {
	img, err := assemble([]string{tree(t, "kasway-agent"), tree(t, "usr/sbin/iptables")}, "kasway-agent", "arm64")
	if err != nil {
		t.Fatal(err)
	}
	archive, names := filepath.Join(t.TempDir(), "image.tar"), tags("kasway-agent", "v1")
	if err := writeArchive(archive, img, names); err != nil {
		t.Fatal(err)
	}
	open := func() (io.ReadCloser, error) { return os.Open(archive) }
	if manifest, err := tarball.LoadManifest(open); err != nil || !slices.Equal(manifest[0].RepoTags, names) {
		t.Errorf("the archive names its image %v (%v), want %v", manifest, err, names)
	}
	for _, n := range names { // found under each
		tag, err := name.NewTag(n)
		if err != nil {
			t.Fatal(err)
		}
		if img, err = tarball.Image(open, &tag); err != nil {
			t.Fatal(err)
		}
	}
	if err := validate.Image(img); err != nil {
		t.Error(err)
	}
	file, err := img.ConfigFile()
	if err != nil {
		t.Fatal(err)
	}
	if file.Architecture != "arm64" || file.OS != "linux" || !slices.Equal(file.Config.Entrypoint, []string{"/kasway-agent"}) {
		t.Errorf("the image is for %s/%s and starts %v", file.OS, file.Architecture, file.Config.Entrypoint)
	}
	if !file.Created.IsZero() {
		t.Errorf("the image tells when it was made: %s", file.Created)
	}
	if layers, err := img.Layers(); err != nil || len(layers) != 2 {
		t.Errorf("the image has %d layers (%v), want one per root", len(layers), err)
	}
}

func TestTags(t *testing.T) {
	for version, want := range map[string][]string{
		"latest":   {"kasway-agent:latest"},
		"v1.2+abc": {"kasway-agent:latest", "kasway-agent:v1.2_abc"},
	} {
		if got := tags("kasway-agent", version); !slices.Equal(got, want) {
			t.Errorf("version %s: tags %v, want %v", version, got, want)
		}
	}
}

// A layer for one machine with a program for another is not made.
func TestSameMachine(t *testing.T) {
	self, err := os.ReadFile("/proc/self/exe")
	if err != nil {
		t.Fatal(err)
	}
	root := tree(t, "text")
	if err := sameMachine(root, "amd64"); err == nil {
		t.Error("a root without any program passes")
	}
	if err := os.WriteFile(filepath.Join(root, "self"), self, 0o600); err != nil {
		t.Fatal(err)
	}
	f, err := elf.Open(filepath.Join(root, "self"))
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = f.Close() }()
	for arch, machine := range machines {
		if err := sameMachine(root, arch); (err == nil) != (machine == f.Machine) {
			t.Errorf("a program for %s in a layer for %s: %v", f.Machine, arch, err)
		}
	}
	if sameMachine(root, "sparc") == nil {
		t.Error("an unknown architecture passes")
	}
}

// What stays of the packages, and that no empty folder and no dangling link does.
func TestPrune(t *testing.T) {
	keep := []string{
		"usr/sbin/iptables-nft-save", "usr/sbin/xtables-legacy-multi", "usr/lib/x86_64-linux-gnu/libc.so.6",
		"usr/lib/x86_64-linux-gnu/xtables/libxt_set.so", "usr/lib64/ld-linux-x86-64.so.2",
		"usr/share/doc/iptables/copyright", "usr/share/common-licenses/GPL-2", "var/lib/dpkg/status.d/iptables",
	}
	drop := []string{
		"etc/ethertypes", "usr/sbin/iptables-apply", "usr/bin/ldd", "usr/share/man/man8/iptables.8.gz",
		"usr/lib/x86_64-linux-gnu/gconv/UTF-16.so", "usr/share/doc/iptables/changelog.gz",
	}
	root := tree(t, append(slices.Clone(keep), drop...)...)
	links := map[string]string{"lib": "usr/lib", "bin": "usr/bin", "usr/share/doc/libgcc-s1": "gcc-12-base"}
	for name, to := range links {
		if err := os.Symlink(to, filepath.Join(root, name)); err != nil {
			t.Fatal(err)
		}
	}
	if err := prune(root); err != nil {
		t.Fatal(err)
	}
	var got []string
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		if entries, _ := os.ReadDir(path); d.IsDir() && len(entries) > 0 {
			return nil
		}
		rel, err := filepath.Rel(root, path)
		got = append(got, rel)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	want := append(keep, "lib", "usr/share/doc/libgcc-s1")
	slices.Sort(want)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("left: %q\nwant: %q", got, want)
	}
}

// A module without a licence stops the build.
func TestCopyLicences(t *testing.T) {
	to := filepath.Join(t.TempDir(), "doc")
	if copyLicences(to, tree(t, "README.md")) == nil {
		t.Error("a module without a licence passes")
	}
	if err := copyLicences(to, tree(t, "LICENSE.txt", "NOTICE", "x.go")); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]bool{"LICENSE.txt": true, "NOTICE": true, "x.go": false} {
		if _, err := os.Stat(filepath.Join(to, name)); (err == nil) != want {
			t.Errorf("%s: %v, want it copied: %t", name, err, want)
		}
	}
}

// Packages of today are used as they are; old ones only where there is no way
// to newer ones.
func TestRefresh(t *testing.T) {
	t.Setenv("PATH", "") // no apt-get
	kept := filepath.Join(t.TempDir(), "amd64")
	if refresh(t.Context(), kept, "amd64") == nil {
		t.Error("nothing is there, nothing can be got, and that is well")
	}
	if err := os.WriteFile(filepath.Join(mkdir(t, kept), "a.deb"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for _, age := range []time.Duration{0, 3 * freshFor} {
		then := time.Now().Add(-age)
		if err := os.Chtimes(kept, then, then); err != nil {
			t.Fatal(err)
		}
		if err := refresh(t.Context(), kept, "amd64"); err != nil {
			t.Errorf("%s old: %v", age, err)
		}
		if _, err := os.Stat(filepath.Join(kept, "a.deb")); err != nil {
			t.Errorf("%s old: %v", age, err)
		}
	}
	if rest, err := os.ReadDir(filepath.Dir(kept)); err != nil || len(rest) != 1 {
		t.Errorf("left beside the packages: %v %v", rest, err)
	}
}

func mkdir(t *testing.T, path string) string {
	t.Helper()
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}
