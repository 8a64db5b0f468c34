//go:build kube

package kube

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/kasway/kasway/tests/kube/bed"
)

// check is one thing that a node can do only with Kasway.
type check struct {
	name string
	do   func(context.Context, *bed.Bed) error
}

// run tries a check until it passes or the time is over, and once at least: a
// try may take its time.
func (c check) run(ctx context.Context, b *bed.Bed, limit time.Duration) error {
	return bed.Poll(ctx, limit, func() error { return c.do(context.WithoutCancel(ctx), b) })
}

// checks are those of one kind of bed, in an order in which each has little left
// to wait for.
func checks(c bed.Config) []check {
	all := []check{{"node is Ready", nodeReady}}
	if c.Bootstrap {
		all = append(all, check{"kubelet joined by token and CSR", joinedByToken})
	}
	all = append(all, check{"pods are Running", podsRunning})
	if c.Form == bed.FormStaticPod {
		all = append(all, check{"agent is a static pod", agentIsStaticPod})
	}
	b := bed.New(c, binaries)
	// The first is the one that every pod is told: kubernetes.default.svc.
	for _, url := range append(b.ClusterURLs(), b.KASURLs()...) {
		all = append(all,
			check{"pod to " + url, podGets("default_podget", url)},
			check{"pod of the host's network to " + url, podGets("kube-system_hostget", url)},
			check{"host to " + url, hostGets(url)})
	}
	return append(all, check{"host to a Service of pods", hostReachesWeb})
}

type condition struct{ Type, Status string }

type pod struct {
	Metadata struct {
		Name, Namespace string
		Annotations     map[string]string
	}
	Status struct {
		Phase      string
		Conditions []condition
		PodIPs     []struct{ IP string }
	}
}

func has(all []condition, kind string) bool {
	for _, c := range all {
		if c.Type == kind && c.Status == "True" {
			return true
		}
	}
	return false
}

func nodeReady(ctx context.Context, b *bed.Bed) error {
	var node struct {
		Status struct{ Conditions []condition }
	}
	if err := b.API().Get(ctx, "/api/v1/nodes/"+bed.NodeName, &node); err != nil {
		return err
	}
	if !has(node.Status.Conditions, "Ready") {
		return fmt.Errorf("the node's conditions are %v", node.Status.Conditions)
	}
	return nil
}

// joinedByToken: the kubelet asked for a certificate with its token, it was
// issued, and the kubelet has it.
func joinedByToken(ctx context.Context, b *bed.Bed) error {
	var list struct {
		Items []struct {
			Spec   struct{ SignerName, Username string }
			Status struct {
				Certificate []byte
				Conditions  []condition
			}
		}
	}
	if err := b.API().Get(ctx, "/apis/certificates.k8s.io/v1/certificatesigningrequests", &list); err != nil {
		return err
	}
	for _, r := range list.Items {
		if r.Spec.SignerName == "kubernetes.io/kube-apiserver-client-kubelet" && r.Spec.Username == "system:bootstrap:abcdef" &&
			has(r.Status.Conditions, "Approved") && len(r.Status.Certificate) > 0 {
			// A link to a path of the node's own.
			_, err := os.Lstat(b.Path("node/kubelet/pki/kubelet-client-current.pem"))
			return err
		}
	}
	return fmt.Errorf("of %d certificate signing requests none is the kubelet's and issued", len(list.Items))
}

// podsRunning: all that the workload asks for runs, with addresses of all
// families, and says that it is ready.
func podsRunning(ctx context.Context, b *bed.Bed) error {
	want := map[string]int{"web": 2, "podget": 1, "hostget": 1}
	if b.Form == bed.FormStaticPod {
		want["kasway-agent"] = 1
	}
	pods, err := pods(ctx, b)
	if err != nil {
		return err
	}
	var waiting []string
	for _, p := range pods {
		kind, _, _ := strings.Cut(p.Metadata.Name, "-")
		if strings.HasPrefix(p.Metadata.Name, bed.Agent) {
			kind = bed.Agent
		}
		if p.Status.Phase != "Running" || !has(p.Status.Conditions, "Ready") || len(p.Status.PodIPs) < len(b.KASURLs()) {
			waiting = append(waiting, fmt.Sprintf("%s %s %v", p.Metadata.Name, p.Status.Phase, p.Status.PodIPs))
			continue
		}
		want[kind]--
	}
	for kind, missing := range want {
		if missing != 0 {
			return fmt.Errorf("%d pods of %s are missing; not ready: %v", missing, kind, waiting)
		}
	}
	return nil
}

func pods(ctx context.Context, b *bed.Bed) ([]pod, error) {
	var list struct{ Items []pod }
	err := b.API().Get(ctx, "/api/v1/pods", &list)
	return list.Items, err
}

// agentIsStaticPod: the KAS knows the agent's pod only because the kubelet,
// which had started it before, told it through the agent.
func agentIsStaticPod(ctx context.Context, b *bed.Bed) error {
	pods, err := pods(ctx, b)
	if err != nil {
		return err
	}
	for _, p := range pods {
		if p.Metadata.Annotations["kubernetes.io/config.mirror"] != "" && p.Metadata.Name == bed.Agent+"-"+bed.NodeName {
			if !has(p.Status.Conditions, "Ready") {
				return fmt.Errorf("its conditions are %v", p.Status.Conditions)
			}
			return nil
		}
	}
	return fmt.Errorf("none of %d pods mirrors it", len(pods))
}

// podGets reads from the node's files what the pod got from url with its token
// after the check began: the last answer must be 200, with the certificate
// verified. KAS → node, the way of kubectl logs, is not needed for that.
func podGets(pod, url string) func(context.Context, *bed.Bed) error {
	began := time.Now()
	return func(_ context.Context, b *bed.Bed) error {
		logs, err := filepath.Glob(b.Path("node/pods", pod+"*", "c", "*.log"))
		if err != nil {
			return err
		}
		last := "nothing"
		for _, log := range logs {
			f, err := os.Open(log)
			if err != nil {
				return err
			}
			for lines := bufio.NewScanner(f); lines.Scan(); {
				// TIME STREAM F TEXT is the kubelet's format.
				stamp, text, _ := strings.Cut(lines.Text(), " ")
				at, err := time.Parse(time.RFC3339Nano, stamp)
				if err == nil && at.After(began) && strings.Contains(text, " "+url+" ") {
					last = text
				}
			}
			f.Close()
		}
		if !strings.HasSuffix(last, "OK "+url+" 200 OK") {
			return fmt.Errorf("the last of its answers in %d logs is %s", len(logs), last)
		}
		return nil
	}
}

// hostGets asks the KAS from a process of the node, by another client than ours.
func hostGets(url string) func(context.Context, *bed.Bed) error {
	return func(ctx context.Context, b *bed.Bed) error {
		out, err := b.HostRun(ctx, "curl", "-sS", "-g", "-m", "2", "--fail", "--cacert", b.Path("pki/ca.crt"), url+"/version")
		if err == nil && !strings.Contains(out, `"gitVersion"`) {
			err = fmt.Errorf("the answer is %q", out)
		}
		return err
	}
}

// hostReachesWeb: kube-proxy has what it learned from the KAS in force.
func hostReachesWeb(ctx context.Context, b *bed.Bed) error {
	_, err := b.HostRun(ctx, "curl", "-sS", "-m", "2", "--fail", bed.WebURL)
	return err
}
