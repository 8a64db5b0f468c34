package bed

import (
	"bytes"
	"embed"
	"fmt"
	"net"
	"os"
	"strings"
	"text/template"
)

//go:embed files
var files embed.FS

// The images of the pods; no registry has them.
const (
	boxImage   = "registry.local/box:1"
	agentImage = "registry.local/kasway-agent:1"
)

// bootstrapToken is that of files/bootstrap.yaml.
const bootstrapToken = "abcdef.0123456789abcdef"

// values are what the files of the bed are filled in with.
type values struct {
	Config
	PKI                   string
	KASURLs, Targets      []string
	Server, AgentOperator string
	BoxImage              string
	CP6, Cluster6         string
	Agent                 agentFiles
}

// nodeValues are what those of a node are filled in with.
type nodeValues struct {
	values
	Name, Dir, Kubelet, CgroupRoot, Cgroup string
	Pods                                   string
	PodRanges                              []string
}

// agentFiles are the paths of the agent's credentials, as it sees them.
type agentFiles struct{ Certificate, Key, CA string }

func (b *Bed) values() values {
	var targets []string
	for _, u := range append(b.ClusterURLs(), b.KASURLs()...) {
		targets = append(targets, strings.TrimPrefix(u, "https://"))
	}
	v := values{
		Config: b.Config, PKI: b.Path("pki"), Targets: targets, KASURLs: append(b.ClusterURLs()[1:], b.KASURLs()...),
		Server: net.JoinHostPort(cp4, kaswayPort), AgentOperator: agentOperator,
		BoxImage: boxImage, CP6: cp6, Cluster6: cluster6,
	}
	if b.Form == FormDaemonSet { // as its manifest mounts them
		v.Agent = agentFiles{"/etc/kasway/tls/tls.crt", "/etc/kasway/tls/tls.key", "/etc/kasway/tls/ca.crt"}
	}
	return v
}

func (n *Node) values() nodeValues {
	ranges := n.bed.families(n.pods4, n.pods6)
	v := nodeValues{
		values: n.bed.values(), Name: n.Name, Dir: n.Path(), Kubelet: n.named("kubelet"),
		CgroupRoot: n.group(), Cgroup: n.Cgroup(), Pods: strings.Join(ranges, ","), PodRanges: ranges,
	}
	etc := n.Path("etc")
	if n.bed.Form == FormStaticPod { // as its manifest mounts it
		etc = "/etc/kasway"
	}
	v.Agent = agentFiles{etc + "/agent.crt", etc + "/agent.key", etc + "/ca.crt"}
	return v
}

// render fills in one of files/.
func render(name string, values any) ([]byte, error) {
	t, err := template.ParseFS(files, "files/"+name)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.Option("missingkey=error").Execute(&out, values); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out.Bytes(), nil
}

// install renders one of files/ to a path of the node.
func (n *Node) install(name, path string) error {
	text, err := render(name, n.values())
	if err != nil {
		return err
	}
	return os.WriteFile(n.Path(path), text, 0o644)
}
