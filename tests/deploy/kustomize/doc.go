// Package kustomize tests, with the tag kube, that kubectl builds what is in
// deploy/ and that it comes out as it is meant.
package kustomize
