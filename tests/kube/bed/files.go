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
	Dir, PKI, Name              string
	CgroupRoot, Pods            string
	PodRanges, Targets, KASURLs []string
	Server, AgentOperator       string
	// Where the agent finds its configuration and keeps what it has to.
	AgentEtc, AgentState, AgentSocket string
	BoxImage                          string
	CP6, Cluster6                     string
}

func (b *Bed) values() values {
	ranges := b.families(pods4, pods6)
	var targets []string
	for _, u := range append(b.ClusterURLs(), b.KASURLs()...) {
		targets = append(targets, strings.TrimPrefix(u, "https://"))
	}
	v := values{
		Config: b.Config, Dir: b.dir, PKI: b.Path("pki"), Name: NodeName,
		CgroupRoot: nodeGroup, Pods: strings.Join(ranges, ","), PodRanges: ranges,
		Targets: targets, KASURLs: append(b.ClusterURLs()[1:], b.KASURLs()...),
		Server: net.JoinHostPort(cp4, kaswayPort), AgentOperator: agentOperator,
		AgentEtc: b.Path("kasway"), AgentState: b.Path("kasway/state"), AgentSocket: b.Path("kasway/agent.sock"),
		BoxImage: boxImage, CP6: cp6, Cluster6: cluster6,
	}
	if b.Form == FormStaticPod { // as its own manifest mounts them
		v.AgentEtc, v.AgentState, v.AgentSocket = "/etc/kasway", "/var/lib/kasway", "/run/kasway/agent.sock"
	}
	return v
}

// render fills in one of files/.
func (b *Bed) render(name string) ([]byte, error) {
	t, err := template.ParseFS(files, "files/"+name)
	if err != nil {
		return nil, err
	}
	var out bytes.Buffer
	if err := t.Option("missingkey=error").Execute(&out, b.values()); err != nil {
		return nil, fmt.Errorf("%s: %w", name, err)
	}
	return out.Bytes(), nil
}

// install renders one of files/ to a path of the bed.
func (b *Bed) install(name string, path ...string) error {
	text, err := b.render(name)
	if err != nil {
		return err
	}
	return os.WriteFile(b.Path(path...), text, 0o644)
}
