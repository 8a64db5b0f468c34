package deploy

import (
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"go.yaml.in/yaml/v3"

	"github.com/kasway/kasway/pkg/config"
)

// Every YAML file under deploy/ can be read, and is one that these tests know.
func TestManifests_AllKnown(t *testing.T) {
	known := []string{
		"daemonset/agent.yaml", "daemonset/components/host-pid/kustomization.yaml", "daemonset/daemonset.yaml",
		"daemonset/kustomization.yaml", "daemonset/namespace.yaml",
		"server/kustomization.yaml", "server/server-config.yaml", "server/server.yaml", "staticpod/kasway-agent.yaml",
	}
	var found []string
	root := filepath.Join(repository, "deploy")
	err := filepath.WalkDir(root, func(path string, d fs.DirEntry, err error) error {
		if err != nil || filepath.Ext(path) != ".yaml" {
			return err
		}
		rel, err := filepath.Rel(root, path)
		found = append(found, rel)
		if len(objects(t, "deploy", rel)) == 0 {
			t.Errorf("%s is empty", rel)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	if slices.Sort(found); !slices.Equal(found, known) {
		t.Errorf("files: %q\nwant:  %q", found, known)
	}
}

// The agent has what diverting takes and nothing more.
func TestManifests_AgentPods(t *testing.T) {
	for name, p := range agentPods(t) {
		t.Run(name, func(t *testing.T) {
			if !p.HostNetwork || p.HostPID || p.HostIPC {
				t.Errorf("hostNetwork %t, hostPID %t, hostIPC %t: want the first alone", p.HostNetwork, p.HostPID, p.HostIPC)
			}
			// Cluster DNS may stand behind the very path that this pod provides.
			if p.DNSPolicy != "Default" || p.PriorityClassName != "system-node-critical" {
				t.Errorf("dnsPolicy %q, priorityClassName %q", p.DNSPolicy, p.PriorityClassName)
			}
			if want := drainSeconds(); p.TerminationGracePeriodSeconds != want {
				t.Errorf("terminationGracePeriodSeconds is %d, want grace + graceSpread + 15 s, which is %d", p.TerminationGracePeriodSeconds, want)
			}
			if len(p.Tolerations) != 1 || len(p.Tolerations[0]) != 1 || p.Tolerations[0]["operator"] != "Exists" {
				t.Errorf("tolerations %v do not let it onto every node", p.Tolerations)
			}
			if len(p.Containers) != 1 || len(p.InitContainers) != 0 {
				t.Fatal("want one container")
			}
			c := p.Containers[0]
			if len(c.Ports) != 0 {
				t.Error("ports are declared: two agents could not share a node during a surge")
			}
			if !slices.Equal(c.ReadinessProbe.Exec.Command, []string{"/kasway-agent", "status", "--ready"}) || c.LivenessProbe != nil {
				t.Errorf("readiness runs %q, liveness %v", c.ReadinessProbe.Exec.Command, c.LivenessProbe)
			}
			least(t, c.SecurityContext, "BPF", "NET_ADMIN", "NET_RAW")
			if c.Image != "kasway-agent:latest" || c.ImagePullPolicy != "IfNotPresent" {
				t.Errorf("image %s is pulled %s: an imported one would not be used", c.Image, c.ImagePullPolicy)
			}
			arguments(t, c.Args, func(f *pflag.FlagSet) { config.AgentFlags(f) })
			agentVolumes(t, p)
		})
	}
}

// drainSeconds is what a superseded agent may take with the default settings,
// and 15 s more.
func drainSeconds() int {
	i := config.AgentDefaults().Intercept
	return int((i.Grace + i.GraceSpread + 15*time.Second).Seconds())
}

// least checks that a container has these privileges only.
func least(t *testing.T, s securityContext, capabilities ...string) {
	t.Helper()
	if s.Privileged || s.AllowPrivilegeEscalation == nil || *s.AllowPrivilegeEscalation || !s.ReadOnlyRootFilesystem {
		t.Errorf("more privileges than wanted: %+v", s)
	}
	if !slices.Equal(s.Capabilities.Drop, []string{"ALL"}) || !slices.Equal(s.Capabilities.Add, capabilities) {
		t.Errorf("capabilities: drop %v, add %v; want ALL, %v", s.Capabilities.Drop, s.Capabilities.Add, capabilities)
	}
	if s.SeccompProfile.Type != "RuntimeDefault" || s.RunAsUser == nil || *s.RunAsUser != 0 {
		t.Errorf("seccomp %q, user %v", s.SeccompProfile.Type, s.RunAsUser)
	}
}

// arguments checks that the binary knows what it is started with, and that it
// reads a file which is mounted there.
func arguments(t *testing.T, args []string, register func(*pflag.FlagSet)) {
	t.Helper()
	if len(args) == 0 || args[0] != "run" {
		t.Fatalf("args %q do not run it", args)
	}
	flags := pflag.NewFlagSet("", pflag.ContinueOnError)
	register(flags)
	if err := flags.Parse(args[1:]); err != nil || flags.NArg() > 0 {
		t.Errorf("args %q: %v", args, err)
	}
}

// agentVolumes checks that what the agent writes is the node's, and nothing
// else of the node is within its reach.
func agentVolumes(t *testing.T, p pod) {
	t.Helper()
	defaults := config.AgentDefaults()
	writes := map[string]string{
		defaults.Intercept.StateDir:                           "DirectoryOrCreate",
		filepath.Dir(defaults.Observe.AdminSocket):            "DirectoryOrCreate",
		"/run/xtables.lock" /* kube-proxy's and iptables' */ : "FileOrCreate",
		"/sys/fs/bpf" /* where the node has it mounted */ :    "Directory",
	}
	reads := []string{"/etc/kasway", "/sys/fs/cgroup"}
	mounts := p.Containers[0].VolumeMounts
	for _, v := range p.Volumes {
		i := slices.IndexFunc(mounts, func(m mountOf) bool { return m.Name == v.Name })
		if i < 0 {
			t.Errorf("volume %s is not mounted", v.Name)
			continue
		}
		m := mounts[i]
		switch {
		case v.Secret != nil:
			if v.Secret.DefaultMode != 0o600 || !m.ReadOnly {
				t.Errorf("secret %s has mode %o", v.Name, v.Secret.DefaultMode)
			}
		case v.HostPath != nil && !m.ReadOnly:
			if writes[m.MountPath] != v.HostPath.Type || m.MountPath != v.HostPath.Path {
				t.Errorf("it may write %s of the node, seen at %s (%s)", v.HostPath.Path, m.MountPath, v.HostPath.Type)
			}
			delete(writes, m.MountPath)
		case v.HostPath != nil && (!slices.Contains(reads, v.HostPath.Path) || m.MountPath != v.HostPath.Path):
			t.Errorf("it may read %s of the node, seen at %s", v.HostPath.Path, m.MountPath)
		}
		// The node's systemd may mount them later; what the agent would mount
		// itself would end with it.
		if kernel := strings.HasPrefix(m.MountPath, "/sys/fs/"); kernel != (m.MountPropagation == "HostToContainer") {
			t.Errorf("%s has propagation %q", m.MountPath, m.MountPropagation)
		}
	}
	if len(writes) > 0 {
		t.Errorf("the agent needs to write %v", writes)
	}
}

// No token of a service account is in the agent's pods: it never talks to a KAS
// for itself.
func TestManifests_NoToken(t *testing.T) {
	p := agentPods(t)["DaemonSet"]
	if p.AutomountServiceAccountToken == nil || *p.AutomountServiceAccountToken {
		t.Error("the DaemonSet mounts a token")
	}
	for _, file := range []string{"daemonset/namespace.yaml", "server/server.yaml"} {
		found := false
		for _, o := range objects(t, "deploy", file) {
			if o.Kind != "ServiceAccount" {
				continue
			}
			found = true
			if o.AutomountServiceAccountToken == nil || *o.AutomountServiceAccountToken {
				t.Errorf("%s: service account %s mounts a token", file, o.Metadata.Name)
			}
		}
		if !found {
			t.Errorf("%s has no service account", file)
		}
	}
}

// The new agent is ready before the old one goes.
func TestManifests_DaemonSet(t *testing.T) {
	w := workloadIn(t, "deploy", "daemonset", "daemonset.yaml")
	if r := w.UpdateStrategy.RollingUpdate; r.MaxSurge != 1 || r.MaxUnavailable != 0 {
		t.Errorf("maxSurge %v, maxUnavailable %v; want 1 and 0", r.MaxSurge, r.MaxUnavailable)
	}
	for k, v := range w.Selector.MatchLabels {
		if w.Template.Metadata.Labels[k] != v {
			t.Errorf("its pods do not have the label %s=%s", k, v)
		}
	}
	for _, o := range objects(t, "deploy", "daemonset", "namespace.yaml") {
		if o.Kind == "Namespace" && o.Metadata.Labels["pod-security.kubernetes.io/enforce"] != "privileged" {
			t.Error("the namespace does not admit the agent's pods")
		}
	}
}

func TestManifests_Server(t *testing.T) {
	w := workloadIn(t, "deploy", "server", "server.yaml")
	if r := w.Strategy.RollingUpdate; w.Replicas < 2 || r.MaxSurge != 1 || r.MaxUnavailable != 0 {
		t.Errorf("%d replicas, maxSurge %v, maxUnavailable %v", w.Replicas, r.MaxSurge, r.MaxUnavailable)
	}
	p := w.Template.Spec
	if p.HostNetwork || p.HostPID || len(p.Containers) != 1 {
		t.Fatalf("hostNetwork %t, hostPID %t, %d containers", p.HostNetwork, p.HostPID, len(p.Containers))
	}
	c := p.Containers[0]
	least(t, c.SecurityContext)
	arguments(t, c.Args, func(f *pflag.FlagSet) { config.ServerFlags(f) })
	cfg, err := config.ParseServer("server-config.yaml", read(t, "deploy", "server", "server-config.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	if !strings.HasSuffix(cfg.Listen.Agents, ":8091") || len(c.Ports) != 1 || c.Ports[0].ContainerPort != 8091 || c.ReadinessProbe.TCPSocket.Port != c.Ports[0].Name {
		t.Errorf("it listens on %s, declares %v and is probed at %v", cfg.Listen.Agents, c.Ports, c.ReadinessProbe.TCPSocket.Port)
	}
	for _, v := range p.Volumes {
		if v.HostPath != nil || v.Secret != nil && v.Secret.DefaultMode != 0o600 {
			t.Errorf("volume %s: %+v", v.Name, v)
		}
	}
	within(t, c, cfg.Identity.Certificate, cfg.Identity.Key, cfg.Identity.CA, "/etc/kasway/server.yaml", cfg.Observe.AdminSocket)
}

// within checks that paths are in a mounted volume.
func within(t *testing.T, c container, paths ...string) {
	t.Helper()
	for _, path := range paths {
		if !slices.ContainsFunc(c.VolumeMounts, func(m mountOf) bool {
			return path == m.MountPath || strings.HasPrefix(path, m.MountPath+"/")
		}) {
			t.Errorf("%s is in no volume", path)
		}
	}
}

// The configuration beside the DaemonSet loads, and means what is mounted.
func TestManifests_AgentConfig(t *testing.T) {
	pods := agentPods(t)
	for name, text := range map[string][]byte{"DaemonSet": read(t, "deploy", "daemonset", "agent.yaml"), "static pod": staticConfig(t)} {
		cfg, err := config.ParseAgent("agent.yaml", text)
		if err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		within(t, pods[name].Containers[0], cfg.Identity.Certificate, cfg.Identity.Key, cfg.Identity.CA,
			"/etc/kasway/agent.yaml", cfg.Observe.AdminSocket, cfg.Intercept.StateDir)
	}
}

// kustomization is as much of one as is looked at here.
type kustomization struct {
	Kind               string
	Namespace          string
	Resources          []string
	ConfigMapGenerator []struct {
		Name  string
		Files []string
	} `yaml:"configMapGenerator"`
	Patches []struct {
		Target struct{ Kind, Name string }
		Patch  string
	}
}

// What kustomizations name is there, and the config maps are those that the
// pods mount.
func TestManifests_Kustomizations(t *testing.T) {
	for dir, p := range map[string]pod{
		"daemonset": agentPods(t)["DaemonSet"], "server": workloadIn(t, "deploy", "server", "server.yaml").Template.Spec,
	} {
		var k kustomization
		if err := yaml.Unmarshal(read(t, "deploy", dir, "kustomization.yaml"), &k); err != nil {
			t.Fatal(err)
		}
		generated := map[string][]string{}
		for _, g := range k.ConfigMapGenerator {
			generated[g.Name] = g.Files
			k.Resources = append(k.Resources, g.Files...)
		}
		for _, r := range k.Resources {
			if _, err := os.Stat(filepath.Join(repository, "deploy", dir, r)); err != nil {
				t.Error(err)
			}
		}
		for _, v := range p.Volumes {
			if v.ConfigMap == nil {
				continue
			}
			for _, m := range p.Containers[0].VolumeMounts {
				if m.Name == v.Name && !slices.Contains(generated[v.ConfigMap.Name], m.SubPath) {
					t.Errorf("%s: config map %s has no key %s", dir, v.ConfigMap.Name, m.SubPath)
				}
			}
		}
		if k.Namespace != "kasway" {
			t.Errorf("%s goes into namespace %q", dir, k.Namespace)
		}
	}
}

// The component adds exactly what its comment says.
func TestManifests_HostPID(t *testing.T) {
	var k kustomization
	if err := yaml.Unmarshal(read(t, "deploy", "daemonset", "components", "host-pid", "kustomization.yaml"), &k); err != nil {
		t.Fatal(err)
	}
	if k.Kind != "Component" || len(k.Resources) > 0 || len(k.Patches) != 1 || k.Patches[0].Target.Kind != "DaemonSet" || k.Patches[0].Target.Name != "kasway-agent" {
		t.Fatalf("it is more than one patch of the DaemonSet: %+v", k)
	}
	type operation struct {
		Op, Path string
		Value    any
	}
	var got []operation
	if err := yaml.Unmarshal([]byte(k.Patches[0].Patch), &got); err != nil {
		t.Fatal(err)
	}
	const spec = "/spec/template/spec/"
	want := []operation{
		{"add", spec + "hostPID", true},
		{"add", spec + "containers/0/securityContext/capabilities/add/-", "SYS_ADMIN"},
		{"add", spec + "containers/0/securityContext/capabilities/add/-", "SYS_PTRACE"},
	}
	if !slices.Equal(got, want) {
		t.Errorf("it does %v\nwant %v", got, want)
	}
}
