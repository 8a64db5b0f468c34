//go:build kube

package kube

import (
	"context"
	"encoding/json"
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
	switch c.Form {
	case bed.FormStaticPod:
		all = append(all, check{"agent is a static pod", agentIsStaticPod})
	case bed.FormDaemonSet:
		all = append(all, check{"agent is a pod of a DaemonSet", agentIsOfDaemonSet})
	}
	b := bed.New(c, binaries)
	// The first is the one that every pod is told: kubernetes.default.svc.
	for _, url := range append(b.ClusterURLs(), b.KASURLs()...) {
		all = append(all,
			onEach("pod to "+url, podGets("default_podget", url)),
			onEach("pod of the host's network to "+url, podGets("kube-system_hostget", url)),
			onEach("host to "+url, hostGets(url)))
	}
	return append(all, onEach("host to a Service of pods", hostReachesWeb), onEach("conns names the clients", connsNames))
}

// onEach is a check that every node must pass.
func onEach(name string, do func(context.Context, *bed.Bed, *bed.Node) error) check {
	return check{name, func(ctx context.Context, b *bed.Bed) error {
		for _, n := range b.Nodes {
			if err := do(ctx, b, n); err != nil {
				return fmt.Errorf("%s: %w", n.Name, err)
			}
		}
		return nil
	}}
}

type condition struct{ Type, Status string }

type pod struct {
	Metadata struct {
		Name, Namespace string
		UID             string
		Annotations     map[string]string
		OwnerReferences []struct{ Kind, Name string }
	}
	Spec   struct{ NodeName string }
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
	for _, n := range b.Nodes {
		var node struct {
			Status struct{ Conditions []condition }
		}
		if err := b.API().Get(ctx, "/api/v1/nodes/"+n.Name, &node); err != nil {
			return err
		}
		if !has(node.Status.Conditions, "Ready") {
			return fmt.Errorf("the conditions of %s are %v", n.Name, node.Status.Conditions)
		}
	}
	return nil
}

// joinedByToken: each kubelet asked for a certificate with its token, it was
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
	issued := 0
	for _, r := range list.Items {
		if r.Spec.SignerName == "kubernetes.io/kube-apiserver-client-kubelet" && r.Spec.Username == "system:bootstrap:abcdef" &&
			has(r.Status.Conditions, "Approved") && len(r.Status.Certificate) > 0 {
			issued++
		}
	}
	if issued < len(b.Nodes) {
		return fmt.Errorf("of %d certificate signing requests %d are a kubelet's and issued", len(list.Items), issued)
	}
	for _, n := range b.Nodes {
		// A link to a path of the node's own.
		if _, err := os.Lstat(n.Path("kubelet/pki/kubelet-client-current.pem")); err != nil {
			return err
		}
	}
	return nil
}

// podsRunning: all that the workload asks for runs, with addresses of all
// families, and says that it is ready.
func podsRunning(ctx context.Context, b *bed.Bed) error {
	want := map[string]int{"web": 2, "podget": len(b.Nodes), "hostget": len(b.Nodes)}
	if b.Form != bed.FormProcess {
		want[bed.Agent] = len(b.Nodes)
	}
	return running(ctx, b, want)
}

// running: so many pods of each kind, which begins their names, are ready.
func running(ctx context.Context, b *bed.Bed, want map[string]int) error {
	pods, err := pods(ctx, b)
	if err != nil {
		return err
	}
	ready := map[string]int{}
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
		ready[kind]++
	}
	for kind, n := range want {
		if ready[kind] != n {
			return fmt.Errorf("%d pods of %s are ready, want %d; not ready: %v", ready[kind], kind, n, waiting)
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
	return agentPods(ctx, b, func(p pod) bool {
		return p.Metadata.Annotations["kubernetes.io/config.mirror"] != "" && p.Metadata.Name == bed.Agent+"-"+p.Spec.NodeName
	})
}

func agentIsOfDaemonSet(ctx context.Context, b *bed.Bed) error {
	return agentPods(ctx, b, func(p pod) bool {
		owners := p.Metadata.OwnerReferences
		return len(owners) == 1 && owners[0].Kind == "DaemonSet" && owners[0].Name == bed.Agent
	})
}

// agentPods: every node has one that is ready.
func agentPods(ctx context.Context, b *bed.Bed, is func(pod) bool) error {
	pods, err := pods(ctx, b)
	if err != nil {
		return err
	}
	ready := map[string]int{}
	for _, p := range pods {
		if is(p) && has(p.Status.Conditions, "Ready") {
			ready[p.Spec.NodeName]++
		}
	}
	for _, n := range b.Nodes {
		if ready[n.Name] != 1 {
			return fmt.Errorf("of %d pods there are %d of the agent ready on %s", len(pods), ready[n.Name], n.Name)
		}
	}
	return nil
}

// podGets reads from the node's files what its pod got from url with its token
// after the check began: the last answer must be 200, with the certificate
// verified. KAS → node, the way of kubectl logs, is not needed for that.
func podGets(pod, url string) func(context.Context, *bed.Bed, *bed.Node) error {
	began := time.Now()
	return func(_ context.Context, _ *bed.Bed, n *bed.Node) error {
		last := "nothing"
		err := podLog(n, pod, began, func(_ time.Time, text string) {
			if strings.Contains(text, " "+url+" ") {
				last = text
			}
		})
		if err == nil && !strings.HasSuffix(last, "OK "+url+" 200 OK") {
			err = fmt.Errorf("the last of its answers is %s", last)
		}
		return err
	}
}

// podLog hands on the lines that pods of a node, whose names begin with pod, have
// written after a moment.
func podLog(n *bed.Node, pod string, after time.Time, line func(at time.Time, text string)) error {
	logs, err := filepath.Glob(n.Path("pods", pod+"*", "c", "*.log"))
	if err != nil {
		return err
	}
	if len(logs) == 0 {
		return fmt.Errorf("there is no log of %s", pod)
	}
	for _, log := range logs {
		text, err := os.ReadFile(log)
		if err != nil {
			return err
		}
		for l := range strings.Lines(string(text)) {
			// TIME STREAM F TEXT is the kubelet's format.
			stamp, rest, _ := strings.Cut(strings.TrimSuffix(l, "\n"), " ")
			at, err := time.Parse(time.RFC3339Nano, stamp)
			if err == nil && at.After(after) {
				line(at, rest)
			}
		}
	}
	return nil
}

// hostGets asks the KAS from a process of the node, by another client than ours.
func hostGets(url string) func(context.Context, *bed.Bed, *bed.Node) error {
	return func(ctx context.Context, b *bed.Bed, n *bed.Node) error {
		out, err := n.Run(ctx, "curl", "-sS", "-g", "-m", "2", "--fail", "--cacert", b.Path("pki/ca.crt"), url+"/version")
		if err == nil && !strings.Contains(out, `"gitVersion"`) {
			err = fmt.Errorf("the answer is %q", out)
		}
		return err
	}
}

// hostReachesWeb: kube-proxy has what it learned from the KAS in force.
func hostReachesWeb(ctx context.Context, _ *bed.Bed, n *bed.Node) error {
	_, err := n.Run(ctx, "curl", "-sS", "-m", "2", "--fail", bed.WebURL)
	return err
}

// connsNames: the agent knows kubelet and kube-proxy by their units and, where it
// sees the connect itself, the pod that watches by its uid.
func connsNames(ctx context.Context, b *bed.Bed, n *bed.Node) error {
	out, err := n.Ask(ctx, "conns", "-o", "json")
	if err != nil {
		return err
	}
	var conns []struct {
		Unit, PodUID, State string
		Pod                 bool
	}
	if err := json.Unmarshal([]byte(out), &conns); err != nil {
		return err
	}
	names := map[string]int{}
	for _, c := range conns {
		switch {
		case c.State != "open":
		case c.Pod:
			names[c.PodUID]++
		default:
			names[c.Unit]++
		}
	}
	want := []string{"kubelet.service", "kube-proxy.service"}
	if b.Mode == "ebpf" {
		pods, err := pods(ctx, b)
		if err != nil {
			return err
		}
		for _, p := range pods {
			if p.Spec.NodeName == n.Name && strings.HasPrefix(p.Metadata.Name, "podget-") {
				want = append(want, p.Metadata.UID)
			}
		}
	}
	for _, name := range want {
		if names[name] == 0 {
			return fmt.Errorf("%s is not among these: %s", name, out)
		}
	}
	return nil
}
