package config

import (
	"fmt"
	"os"

	"github.com/kasway/kasway/pkg/certs"
)

// CheckCredentials looks at the files that i names: each must be readable, and
// the key must be its owner's alone. Errors are an *Error. What is in the files
// is checked where they are used.
func CheckCredentials(i Identity) error {
	d := newDecoder()
	for _, f := range []struct {
		path, name string
		secret     bool
	}{
		{"identity.certificate", i.Certificate, false},
		{"identity.key", i.Key, true},
		{"identity.ca", i.CA, false},
	} {
		if f.name == "" {
			continue
		}
		if problem := checkFile(f.name, f.secret); problem != "" {
			d.reject(f.path, "%s", problem)
		}
	}
	return d.err()
}

// checkFile returns what is wrong with a credential's file. Symbolic links are
// followed: a projected volume is made of them.
func checkFile(name string, secret bool) string {
	info, err := os.Stat(name)
	if err != nil {
		return fmt.Sprintf("%v; the file must exist and be readable", err)
	}
	switch {
	case !info.Mode().IsRegular():
		return fmt.Sprintf("%s is not a regular file; name the file itself", name)
	case info.Size() == 0:
		return fmt.Sprintf("%s is empty; put the credential there", name)
	case secret:
		if err := certs.CheckKey(name); err != nil {
			return err.Error()
		}
	}
	f, err := os.Open(name)
	if err != nil {
		return fmt.Sprintf("%v; the file must be readable", err)
	}
	_ = f.Close() // nothing was written
	return ""
}
