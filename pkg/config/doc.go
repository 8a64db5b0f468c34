// Package config reads the files and flags of both binaries, strictly: an
// unknown or wrong field is an error that names file, line and what is allowed.
package config
