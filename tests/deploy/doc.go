// Package deploy tests what users install: the images, the manifests, the
// systemd unit and the commands of the README.
package deploy
