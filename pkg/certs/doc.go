// Package certs is the credentials of both binaries: it makes a certificate
// authority with certificates for servers and agents, keeps them in files, and
// loads such files, whoever made them, into TLS configurations.
package certs
