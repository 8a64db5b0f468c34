package bed

import (
	"context"
	"os"
	"time"
)

// UserInformers is who the informers are in the audit log.
const UserInformers = "informers"

// auditPolicy keeps one line for each list and watch: what was listed again
// after an outage, and by whom, is read from it.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [ResponseStarted, ResponseComplete, Panic]
rules:
- level: Metadata
  verbs: [list, watch]
- level: None
`

// controlPlaneUp starts etcd, the KAS, the controller-manager and the scheduler
// and waits for the KAS. It advertises its own, real address.
func (b *Bed) controlPlaneUp(ctx context.Context) error {
	if err := os.WriteFile(b.Path("audit-policy.yaml"), []byte(auditPolicy), 0o644); err != nil {
		return err
	}
	var err error
	if b.api, err = b.newAPI(); err != nil {
		return err
	}
	// The short election timeout removes a wait of a second for the first
	// leader; the data need not survive anything.
	if err := b.component("etcd", "--data-dir", b.Path("etcd"), "--unsafe-no-fsync", "--log-level", "warn",
		"--listen-client-urls", "http://127.0.0.1:2379", "--advertise-client-urls", "http://127.0.0.1:2379",
		"--listen-peer-urls", "http://127.0.0.1:2380", "--heartbeat-interval", "20", "--election-timeout", "200"); err != nil {
		return err
	}
	if err := b.component("kube-apiserver", b.kasFlags()...); err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	if err := poll(ctx, 50*time.Millisecond, func() error {
		if err := b.Running("kube-apiserver"); err != nil {
			return err
		}
		return b.api.Get(ctx, "/readyz", nil)
	}); err != nil {
		return err
	}
	manager, scheduler := b.Path("pki/controller-manager.kubeconfig"), b.Path("pki/scheduler.kubeconfig")
	if err := b.component("kube-controller-manager", "--kubeconfig="+manager,
		"--authentication-kubeconfig="+manager, "--authorization-kubeconfig="+manager, "--leader-elect=false",
		"--service-account-private-key-file="+b.Path("pki/sa.key"), "--root-ca-file="+b.Path("pki/ca.crt"),
		"--cluster-signing-cert-file="+b.Path("pki/ca.crt"), "--cluster-signing-key-file="+b.Path("pki/ca.key"),
		"--requestheader-client-ca-file="+b.Path("pki/front-proxy-ca.crt"), "--use-service-account-credentials=true",
		// Its default is a folder of the machine, which it would make.
		"--flex-volume-plugin-dir="+b.Path("flex"), "--cert-dir="+b.Path("controller-manager")); err != nil {
		return err
	}
	return b.component("kube-scheduler", "--kubeconfig="+scheduler, "--authentication-kubeconfig="+scheduler,
		"--authorization-kubeconfig="+scheduler, "--leader-elect=false", "--cert-dir="+b.Path("scheduler"))
}

// component starts one of hyperkube's in the control plane.
func (b *Bed) component(name string, flags ...string) error {
	return b.start(name, place{netns: nsCP}, nil, append([]string{b.bin.Hyperkube, name}, flags...)...)
}

func (b *Bed) kasFlags() []string {
	services, bind := services4, "0.0.0.0"
	if b.DualStack {
		services, bind = services4+","+services6, "::"
	}
	pki := func(name string) string { return b.Path("pki", name) }
	return []string{
		"--etcd-servers=http://127.0.0.1:2379", "--secure-port=" + kasPort, "--bind-address=" + bind,
		"--advertise-address=" + cp4, "--service-cluster-ip-range=" + services,
		"--tls-cert-file=" + pki("apiserver.crt"), "--tls-private-key-file=" + pki("apiserver.key"),
		"--client-ca-file=" + pki("ca.crt"), "--cert-dir=" + b.Path("apiserver"),
		"--service-account-issuer=https://kubernetes.default.svc", "--service-account-key-file=" + pki("sa.pub"),
		"--service-account-signing-key-file=" + pki("sa.key"),
		"--kubelet-client-certificate=" + pki("apiserver-kubelet-client.crt"),
		"--kubelet-client-key=" + pki("apiserver-kubelet-client.key"), "--kubelet-certificate-authority=" + pki("ca.crt"),
		"--requestheader-client-ca-file=" + pki("front-proxy-ca.crt"), "--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
		"--proxy-client-cert-file=" + pki("front-proxy-client.crt"), "--proxy-client-key-file=" + pki("front-proxy-client.key"),
		"--kubelet-preferred-address-types=InternalIP,Hostname", "--authorization-mode=Node,RBAC",
		"--enable-bootstrap-token-auth=true", "--allow-privileged=true", "--profiling=false",
		"--enable-priority-and-fairness=false", "--shutdown-delay-duration=0s",
		"--audit-policy-file=" + b.Path("audit-policy.yaml"), "--audit-log-path=" + b.Path("log/audit.json"),
	}
}
