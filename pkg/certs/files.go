package certs

import (
	"crypto"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
)

// Names of an authority's files in its directory.
const (
	CACertificate = "ca.crt"
	CAKey         = "ca.key"
)

// ErrExists marks a file that is there already and was left alone.
var ErrExists = errors.New("exists already")

// LoadAuthority loads the authority that Save put into dir. If there is none,
// the error wraps fs.ErrNotExist.
func LoadAuthority(dir string) (*Authority, error) {
	cert, key := filepath.Join(dir, CACertificate), filepath.Join(dir, CAKey)
	pair, err := loadPair(cert, key)
	if err != nil {
		return nil, err
	}
	if !pair.Leaf.IsCA {
		return nil, fmt.Errorf("%s is not an authority's certificate", cert)
	}
	pem, err := os.ReadFile(cert)
	if err != nil {
		return nil, fmt.Errorf("certificate: %w", err)
	}
	signer, ok := pair.PrivateKey.(crypto.Signer)
	if !ok {
		return nil, fmt.Errorf("the key in %s cannot sign", key)
	}
	return &Authority{Pair: Pair{Certificate: pair.Leaf, CertPEM: pem}, key: signer}, nil
}

// Save writes a pair as <name>.crt (0644) and <name>.key (0600) into dir,
// which is made (0700) if it is missing, and returns the paths. Neither file
// is ever half there; if either exists and force is false, the error wraps
// ErrExists and nothing has changed.
func Save(dir, name string, p Pair, force bool) (cert, key string, err error) {
	cert, key = filepath.Join(dir, name+".crt"), filepath.Join(dir, name+".key")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return "", "", fmt.Errorf("making the directory: %w", err)
	}
	if !force {
		for _, path := range []string{key, cert} {
			if _, err := os.Lstat(path); err == nil {
				return "", "", fmt.Errorf("%s %w", path, ErrExists)
			} else if !errors.Is(err, fs.ErrNotExist) {
				return "", "", err
			}
		}
	}
	// The key first: a certificate without its key is of no use to anybody.
	if err := write(key, p.KeyPEM, 0o600, force); err != nil {
		return "", "", err
	}
	if err := write(cert, p.CertPEM, 0o644, force); err != nil {
		if !force {
			_ = os.Remove(key)
		}
		return "", "", err
	}
	return cert, key, nil
}

// write makes the file whole under another name first, then gives it its own.
func write(path string, data []byte, mode os.FileMode, replace bool) error {
	// CreateTemp makes it 0600, so that nobody can read a key even now.
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(f.Name()) }() // gone already after a rename
	_, err = f.Write(data)
	err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close())
	if err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	if replace {
		return os.Rename(f.Name(), path)
	}
	// Unlike a rename, a link never replaces what somebody put there meanwhile.
	if err := os.Link(f.Name(), path); errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s %w", path, ErrExists)
	} else if err != nil {
		return err
	}
	return nil
}
