package deploy

import (
	"bytes"
	"errors"
	"io"
	"testing"

	"go.yaml.in/yaml/v3"
)

// object is as much of a Kubernetes object as is looked at here.
type object struct {
	Kind     string
	Metadata struct {
		Name, Namespace string
		Labels          map[string]string
	}
	AutomountServiceAccountToken *bool `yaml:"automountServiceAccountToken"`
	Spec                         yaml.Node
}

// workload is the spec of a DaemonSet or a Deployment.
type workload struct {
	Replicas       int
	Selector       struct{ MatchLabels map[string]string }
	UpdateStrategy strategy `yaml:"updateStrategy"` // of a DaemonSet
	Strategy       strategy // of a Deployment
	Template       struct {
		Metadata struct{ Labels map[string]string }
		Spec     pod
	}
}

type strategy struct {
	RollingUpdate struct {
		MaxSurge       any `yaml:"maxSurge"`
		MaxUnavailable any `yaml:"maxUnavailable"`
	} `yaml:"rollingUpdate"`
}

// pod is the spec of a pod.
type pod struct {
	ServiceAccountName            string `yaml:"serviceAccountName"`
	AutomountServiceAccountToken  *bool  `yaml:"automountServiceAccountToken"`
	HostNetwork                   bool   `yaml:"hostNetwork"`
	HostPID                       bool   `yaml:"hostPID"`
	HostIPC                       bool   `yaml:"hostIPC"`
	DNSPolicy                     string `yaml:"dnsPolicy"`
	PriorityClassName             string `yaml:"priorityClassName"`
	TerminationGracePeriodSeconds int    `yaml:"terminationGracePeriodSeconds"`
	Tolerations                   []map[string]string
	Containers                    []container
	InitContainers                []container `yaml:"initContainers"`
	Volumes                       []volume
}

type container struct {
	Name, Image     string
	ImagePullPolicy string `yaml:"imagePullPolicy"`
	Command, Args   []string
	Env             []yaml.Node
	Ports           []struct {
		Name          string
		ContainerPort int `yaml:"containerPort"`
		HostPort      int `yaml:"hostPort"`
	}
	ReadinessProbe  probe           `yaml:"readinessProbe"`
	LivenessProbe   *yaml.Node      `yaml:"livenessProbe"`
	SecurityContext securityContext `yaml:"securityContext"`
	VolumeMounts    []mountOf       `yaml:"volumeMounts"`
}

type probe struct {
	Exec      struct{ Command []string }
	TCPSocket struct{ Port any } `yaml:"tcpSocket"`
}

type securityContext struct {
	Privileged               bool
	RunAsUser                *int  `yaml:"runAsUser"`
	AllowPrivilegeEscalation *bool `yaml:"allowPrivilegeEscalation"`
	ReadOnlyRootFilesystem   bool  `yaml:"readOnlyRootFilesystem"`
	Capabilities             struct{ Add, Drop []string }
	SeccompProfile           struct{ Type string } `yaml:"seccompProfile"`
}

type mountOf struct {
	Name      string
	MountPath string `yaml:"mountPath"`
	SubPath   string `yaml:"subPath"`
	ReadOnly  bool   `yaml:"readOnly"`

	MountPropagation string `yaml:"mountPropagation"`
}

type volume struct {
	Name     string
	HostPath *struct{ Path, Type string } `yaml:"hostPath"`
	Secret   *struct {
		SecretName  string      `yaml:"secretName"`
		DefaultMode uint32      `yaml:"defaultMode"`
		Items       []yaml.Node `yaml:"items"`
	}
	ConfigMap *struct{ Name string }   `yaml:"configMap"`
	EmptyDir  *struct{ Medium string } `yaml:"emptyDir"`
}

// objects parses all documents of a manifest; a field given twice is an error.
func objects(t *testing.T, path ...string) (all []object) {
	t.Helper()
	for d := yaml.NewDecoder(bytes.NewReader(read(t, path...))); ; {
		var o object
		err := d.Decode(&o)
		if errors.Is(err, io.EOF) {
			return all
		}
		if err != nil {
			t.Fatalf("%v: %v", path, err)
		}
		all = append(all, o)
	}
}

// workloadIn is the one workload of a manifest.
func workloadIn(t *testing.T, path ...string) (w workload) {
	t.Helper()
	n := 0
	for _, o := range objects(t, path...) {
		if o.Kind == "DaemonSet" || o.Kind == "Deployment" {
			n++
			if err := o.Spec.Decode(&w); err != nil {
				t.Fatal(err)
			}
		}
	}
	if n != 1 {
		t.Fatalf("%v has %d workloads", path, n)
	}
	return w
}

// agentPods are the two manifests that run the agent.
func agentPods(t *testing.T) map[string]pod {
	t.Helper()
	static := objects(t, "deploy", "staticpod", "kasway-agent.yaml")
	if len(static) != 1 || static[0].Kind != "Pod" {
		t.Fatal("the static pod's file does not hold one pod")
	}
	var p pod
	if err := static[0].Spec.Decode(&p); err != nil {
		t.Fatal(err)
	}
	return map[string]pod{"static pod": p, "DaemonSet": workloadIn(t, "deploy", "daemonset", "daemonset.yaml").Template.Spec}
}
