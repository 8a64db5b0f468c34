package main

import (
	"archive/tar"
	"encoding/json"
	"errors"
	"io"
	"os"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
)

// writeArchive writes an image under its tags. The library's own writer puts
// several tags in an order of chance.
func writeArchive(path string, img v1.Image, tags []string) (err error) {
	ref, err := name.NewTag(tags[0])
	if err != nil {
		return err
	}
	manifest, err := tarball.ComputeManifest(map[name.Reference]v1.Image{ref: img})
	if err != nil {
		return err
	}
	manifest[0].RepoTags = tags
	list, err := json.Marshal(manifest)
	if err != nil {
		return err
	}
	config, err := img.RawConfigFile()
	if err != nil {
		return err
	}
	layers, err := img.Layers()
	if err != nil {
		return err
	}
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, f.Close()) }()
	w := tar.NewWriter(f)
	if err := put(w, manifest[0].Config, config); err != nil {
		return err
	}
	for i, l := range layers {
		content, err := l.Compressed()
		if err != nil {
			return err
		}
		data, err := io.ReadAll(content)
		if err := errors.Join(err, content.Close()); err != nil {
			return err
		}
		if err := put(w, manifest[0].Layers[i], data); err != nil {
			return err
		}
	}
	return errors.Join(put(w, "manifest.json", list), w.Close())
}

func put(w *tar.Writer, name string, data []byte) error {
	if err := w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data)), Typeflag: tar.TypeReg}); err != nil {
		return err
	}
	_, err := w.Write(data)
	return err
}
