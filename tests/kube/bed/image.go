package bed

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
)

// writeImage writes an image archive, as `docker save` makes it, that holds one
// static binary, in the root under its own name, and starts it.
func writeImage(name, binary, file string) error {
	program, err := os.ReadFile(binary)
	if err != nil {
		return err
	}
	var layer bytes.Buffer
	if err := writeTar(&layer,
		entry{"etc/", nil}, entry{"tmp/", nil}, entry{"dev/", nil}, entry{"proc/", nil}, entry{"sys/", nil},
		entry{"var/", nil}, entry{"var/run/", nil},
		entry{"etc/passwd", []byte("root:x:0:0:root:/:/none\n")},
		entry{filepath.Base(binary), program},
	); err != nil {
		return err
	}
	config, err := json.Marshal(map[string]any{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": map[string]any{"Entrypoint": []string{"/" + filepath.Base(binary)}, "WorkingDir": "/"},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer.Bytes()))}},
	})
	if err != nil {
		return err
	}
	configName := fmt.Sprintf("%x.json", sha256.Sum256(config))
	manifest, err := json.Marshal([]map[string]any{{"Config": configName, "RepoTags": []string{name}, "Layers": []string{"layer.tar"}}})
	if err != nil {
		return err
	}
	var archive bytes.Buffer
	if err := writeTar(&archive, entry{configName, config}, entry{"layer.tar", layer.Bytes()}, entry{"manifest.json", manifest}); err != nil {
		return err
	}
	return os.WriteFile(file, archive.Bytes(), 0o644)
}

// entry is a file of an archive; one without content is a folder.
type entry struct {
	name    string
	content []byte
}

func writeTar(to io.Writer, entries ...entry) error {
	w := tar.NewWriter(to)
	for _, e := range entries {
		kind := byte(tar.TypeReg)
		if e.content == nil {
			kind = tar.TypeDir
		}
		if err := w.WriteHeader(&tar.Header{Name: e.name, Mode: 0o755, Size: int64(len(e.content)), Typeflag: kind}); err != nil {
			return err
		}
		if _, err := w.Write(e.content); err != nil {
			return err
		}
	}
	return w.Close()
}
