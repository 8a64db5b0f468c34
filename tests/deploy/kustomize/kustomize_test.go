//go:build kube

package kustomize

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

const deploy = "../../../deploy"

// kubectl is the one of the Kubernetes that tests/kube runs.
func kubectl(t *testing.T) string {
	t.Helper()
	cmd := exec.Command("../../kube/build.sh")
	cmd.Stderr = os.Stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("building kubectl: %v", err)
	}
	return strings.TrimSpace(string(out))
}

// build is what `kubectl apply -k dir` would apply.
func build(t *testing.T, hyperkube, dir string) (text string, objects []map[string]any) {
	t.Helper()
	out, err := exec.Command(hyperkube, "kubectl", "kustomize", dir).Output()
	if err != nil {
		t.Fatalf("kubectl kustomize %s: %v", dir, err)
	}
	for d := yaml.NewDecoder(strings.NewReader(string(out))); ; {
		var o map[string]any
		if d.Decode(&o) != nil {
			return string(out), objects
		}
		objects = append(objects, o)
	}
}

// at follows a path of keys and, for lists, names of elements.
func at(v any, path ...string) any {
	for _, p := range path {
		switch x := v.(type) {
		case map[string]any:
			v = x[p]
		case []any:
			i := slices.IndexFunc(x, func(e any) bool { return at(e, "name") == p })
			if i < 0 {
				return nil
			}
			v = x[i]
		default:
			return nil
		}
	}
	return v
}

func only(t *testing.T, objects []map[string]any, kind string) map[string]any {
	t.Helper()
	var found []map[string]any
	for _, o := range objects {
		if o["kind"] == kind {
			found = append(found, o)
		}
	}
	if len(found) != 1 {
		t.Fatalf("%d objects of kind %s", len(found), kind)
	}
	return found[0]
}

// Both kustomizations build; everything goes into the namespace, the pods mount
// the generated configuration, and the key stays for its owner alone.
func TestKustomize(t *testing.T) {
	hyperkube := kubectl(t)
	for dir, kind := range map[string]string{"daemonset": "DaemonSet", "server": "Deployment"} {
		_, objects := build(t, hyperkube, filepath.Join(deploy, dir))
		for _, o := range objects {
			if o["kind"] != "Namespace" && at(o, "metadata", "namespace") != "kasway" {
				t.Errorf("%s: %v %v is not in namespace kasway", dir, o["kind"], at(o, "metadata", "name"))
			}
		}
		volumes := at(only(t, objects, kind), "spec", "template", "spec", "volumes")
		if want, got := at(only(t, objects, "ConfigMap"), "metadata", "name"), at(volumes, "config", "configMap", "name"); want != got {
			t.Errorf("%s mounts config map %v, generated is %v", dir, got, want)
		}
		if got := at(volumes, "tls", "secret", "defaultMode"); got != 0o600 {
			t.Errorf("%s: the key has mode %v", dir, got)
		}
	}
}

// The component adds three lines.
func TestKustomize_HostPID(t *testing.T) {
	hyperkube := kubectl(t)
	plain, _ := build(t, hyperkube, filepath.Join(deploy, "daemonset"))
	dir := t.TempDir()
	from, err := filepath.Abs(filepath.Join(deploy, "daemonset"))
	if err != nil {
		t.Fatal(err)
	}
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		t.Fatal(err)
	}
	if from, err = filepath.Rel(dir, from); err != nil {
		t.Fatal(err)
	}
	text := fmt.Sprintf("apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources: [%[1]s]\ncomponents: [%[1]s/components/host-pid]\n", from)
	if err := os.WriteFile(filepath.Join(dir, "kustomization.yaml"), []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	with, _ := build(t, hyperkube, dir)
	had := strings.Split(plain, "\n")
	var added []string
	for line := range strings.SplitSeq(with, "\n") {
		if i := slices.Index(had, line); i >= 0 {
			had = slices.Delete(had, i, i+1)
		} else {
			added = append(added, strings.TrimSpace(line))
		}
	}
	if want := []string{"- SYS_ADMIN", "- SYS_PTRACE", "hostPID: true"}; !slices.Equal(added, want) || len(had) > 0 {
		t.Errorf("added %q, want %q; gone %q", added, want, had)
	}
}
