// hyperkube is every Kubernetes component a test cluster needs, and etcd, in one binary,
// chosen by the first argument or by the name it is called by; and informers,
// a client like those of a real cluster.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"github.com/spf13/cobra"
	"go.etcd.io/etcd/server/v3/etcdmain"
	"k8s.io/component-base/cli"
	_ "k8s.io/component-base/logs/json/register"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	kubectl "k8s.io/kubectl/pkg/cmd"
	kubectlutil "k8s.io/kubectl/pkg/cmd/util"
	apiserver "k8s.io/kubernetes/cmd/kube-apiserver/app"
	controllers "k8s.io/kubernetes/cmd/kube-controller-manager/app"
	proxy "k8s.io/kubernetes/cmd/kube-proxy/app"
	scheduler "k8s.io/kubernetes/cmd/kube-scheduler/app"
	kubelet "k8s.io/kubernetes/cmd/kubelet/app"
)

func main() {
	name := filepath.Base(os.Args[0])
	for range 2 {
		switch name {
		case "etcd":
			etcdmain.Main(os.Args)
			return
		case "kube-apiserver":
			run(apiserver.NewAPIServerCommand())
		case "kube-controller-manager":
			run(controllers.NewControllerManagerCommand())
		case "kube-scheduler":
			run(scheduler.NewSchedulerCommand())
		case "kube-proxy":
			run(proxy.NewProxyCommand())
		case "kubelet":
			run(kubelet.NewKubeletCommand(context.Background()))
		case "kubectl":
			if err := cli.RunNoErrOutput(kubectl.NewDefaultKubectlCommand()); err != nil {
				kubectlutil.CheckErr(err)
			}
			return
		case "informers":
			if err := informers(os.Args[1:]); err != nil {
				fmt.Fprintln(os.Stderr, "informers:", err)
				os.Exit(1)
			}
			return
		}
		if len(os.Args) > 1 {
			name = os.Args[1]
			os.Args = os.Args[1:]
		}
	}
	fmt.Fprintln(os.Stderr, "usage: hyperkube etcd|kube-apiserver|kube-controller-manager|kube-scheduler|kube-proxy|kubelet|kubectl|informers ...")
	os.Exit(2)
}

func run(c *cobra.Command) { os.Exit(cli.Run(c)) }
