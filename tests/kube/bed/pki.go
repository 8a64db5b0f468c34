package bed

import (
	"context"
	"crypto"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/base64"
	"encoding/pem"
	"fmt"
	"math/big"
	"net"
	"os"
	"time"
)

// pair is a certificate with its key.
type pair struct {
	cert            *x509.Certificate
	key             crypto.Signer
	certPEM, keyPEM []byte
}

// certificates writes those of Kubernetes, and the kubeconfigs, to pki/. They
// are made for the addresses of this bed and die with it.
func (b *Bed) certificates(context.Context) error {
	ca, err := b.issue("ca", nil, "kube-ca", nil, nil)
	if err != nil {
		return err
	}
	kasNames := []string{"localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc",
		"kubernetes.default.svc.cluster.local", "127.0.0.1", "::1", cp4, cp6, cluster4, cluster6}
	frontProxy, err := b.issue("front-proxy-ca", nil, "front-proxy-ca", nil, nil)
	if err != nil {
		return err
	}
	for _, c := range []struct {
		file, cn string
		groups   []string
		names    []string
		ca       *pair
	}{
		{"apiserver", "kube-apiserver", nil, kasNames, ca},
		{"apiserver-kubelet-client", "kube-apiserver-kubelet-client", []string{"system:masters"}, nil, ca},
		{"front-proxy-client", "front-proxy-client", nil, nil, frontProxy},
	} {
		if _, err := b.issue(c.file, c.ca, c.cn, c.groups, c.names); err != nil {
			return err
		}
	}
	for _, n := range b.Nodes {
		names := []string{n.Name, "localhost", "127.0.0.1", n.v4, n.v6}
		if _, err := b.issue(n.named("kubelet"), ca, n.User(), []string{"system:nodes"}, names); err != nil {
			return err
		}
	}
	sa, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return err
	}
	if _, err := b.writeKeys("sa", sa); err != nil {
		return err
	}
	return b.kubeconfigs(ca)
}

// kubeconfigs writes one for every component. Those of a node name the KAS's
// own address, which the node cannot reach by itself.
func (b *Bed) kubeconfigs(ca *pair) error {
	type user struct {
		file, url, cn string
		groups        []string
	}
	atCP, atNode := kasURL("127.0.0.1", kasPort), kasURL(cp4, kasPort)
	users := []user{
		{"admin", atCP, "admin", []string{"system:masters"}},
		{"controller-manager", atCP, "system:kube-controller-manager", nil},
		{"scheduler", atCP, "system:kube-scheduler", nil},
		{"kube-proxy", atNode, "system:kube-proxy", nil},
		{"informers", atNode, UserInformers, []string{"system:masters"}},
	}
	for _, n := range b.Nodes {
		users = append(users, user{n.named("kubelet"), atNode, n.User(), []string{"system:nodes"}})
	}
	for _, u := range users {
		p, err := b.issue("client-"+u.file, ca, u.cn, u.groups, nil)
		if err != nil {
			return err
		}
		b64 := base64.StdEncoding.EncodeToString
		credentials := fmt.Sprintf("client-certificate-data: %s, client-key-data: %s", b64(p.certPEM), b64(p.keyPEM))
		if err := b.kubeconfig(u.file, u.url, ca, credentials); err != nil {
			return err
		}
	}
	return b.kubeconfig("bootstrap", atNode, ca, "token: "+bootstrapToken)
}

func (b *Bed) kubeconfig(file, url string, ca *pair, credentials string) error {
	text := fmt.Sprintf(`apiVersion: v1
kind: Config
clusters: [{name: c, cluster: {server: %q, certificate-authority-data: %s}}]
users: [{name: u, user: {%s}}]
contexts: [{name: x, context: {cluster: c, user: u}}]
current-context: x
`, url, base64.StdEncoding.EncodeToString(ca.certPEM), credentials)
	return os.WriteFile(b.Path("pki", file+".kubeconfig"), []byte(text), 0o600)
}

// issue makes a certificate signed by ca (nil: a CA of its own) and writes
// FILE.crt and FILE.key. The names are DNS names and addresses.
func (b *Bed) issue(file string, ca *pair, cn string, groups, names []string) (*pair, error) {
	serial, err := rand.Int(rand.Reader, new(big.Int).Lsh(big.NewInt(1), 120))
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	t := &x509.Certificate{
		SerialNumber: serial,
		Subject:      pkix.Name{CommonName: cn, Organization: groups},
		NotBefore:    time.Now().Add(-time.Hour),
		NotAfter:     time.Now().Add(24 * time.Hour),
		KeyUsage:     x509.KeyUsageDigitalSignature,
		ExtKeyUsage:  []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	for _, n := range names {
		if ip := net.ParseIP(n); ip != nil {
			t.IPAddresses = append(t.IPAddresses, ip)
		} else {
			t.DNSNames = append(t.DNSNames, n)
		}
	}
	parent, signer := t, crypto.Signer(key)
	if ca == nil {
		t.IsCA, t.BasicConstraintsValid = true, true
		t.KeyUsage, t.ExtKeyUsage = x509.KeyUsageCertSign|x509.KeyUsageDigitalSignature, nil
	} else {
		parent, signer = ca.cert, ca.key
	}
	der, err := x509.CreateCertificate(rand.Reader, t, parent, key.Public(), signer)
	if err != nil {
		return nil, fmt.Errorf("certificate %s: %w", file, err)
	}
	p := &pair{key: key, certPEM: pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: der})}
	if p.cert, err = x509.ParseCertificate(der); err != nil {
		return nil, err
	}
	if p.keyPEM, err = b.writeKeys(file, key); err != nil {
		return nil, err
	}
	return p, os.WriteFile(b.Path("pki", file+".crt"), p.certPEM, 0o600)
}

// writeKeys writes FILE.key and FILE.pub.
func (b *Bed) writeKeys(file string, key *ecdsa.PrivateKey) ([]byte, error) {
	private, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(key.Public())
	if err != nil {
		return nil, err
	}
	text := pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: private})
	if err := os.WriteFile(b.Path("pki", file+".key"), text, 0o600); err != nil {
		return nil, err
	}
	return text, os.WriteFile(b.Path("pki", file+".pub"), pem.EncodeToMemory(&pem.Block{Type: "PUBLIC KEY", Bytes: public}), 0o600)
}
