package deploy

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/kasway/kasway/tests/netns"
)

// kubelet starts pods on a host as their specs say, without a cluster.
type kubelet struct {
	host *netns.Host
	// dir holds the host's files: what hostPath volumes show.
	dir, hosts string
	// secrets and configMaps are their keys by name.
	secrets, configMaps map[string]map[string][]byte
}

// container is the first container of p, as the manifest says; argv replaces
// what it starts (a probe, another command), more are further arguments.
func (k kubelet) container(p pod, image imageRoot, argv []string, more ...string) (spec, error) {
	c := p.Containers[0]
	s := spec{
		Root: image.dir, ReadOnly: c.SecurityContext.ReadOnlyRootFilesystem, Env: image.config.Env,
		Capabilities: c.SecurityContext.Capabilities.Add,
		Mounts:       []bind{{From: k.hosts, To: "/etc/hosts"}},
	}
	if !slices.Equal(c.SecurityContext.Capabilities.Drop, []string{"ALL"}) {
		return s, errors.New("not all capabilities are dropped")
	}
	if e := c.SecurityContext.AllowPrivilegeEscalation; e != nil {
		s.NoNewPrivileges = !*e
	}
	if s.Argv = argv; argv == nil {
		s.Argv = slices.Concat(image.config.Entrypoint, c.Args, more)
	}
	for _, m := range c.VolumeMounts {
		i := slices.IndexFunc(p.Volumes, func(v volume) bool { return v.Name == m.Name })
		if i < 0 {
			return s, fmt.Errorf("volume %s is mounted, and there is none of that name", m.Name)
		}
		from, readOnly, err := k.volume(p.Volumes[i])
		if err != nil {
			return s, err
		}
		s.Mounts = append(s.Mounts, bind{filepath.Join(from, m.SubPath), m.MountPath, m.ReadOnly || readOnly})
	}
	return s, nil
}

// volume makes one and returns where it is.
func (k kubelet) volume(v volume) (path string, readOnly bool, err error) {
	path = filepath.Join(k.dir, "volumes", v.Name)
	switch {
	case v.HostPath != nil:
		path = filepath.Join(k.dir, v.HostPath.Path)
		return path, false, hostPath(path, v.HostPath.Type)
	case v.Secret != nil:
		return path, true, keys(path, k.secrets[v.Secret.SecretName], os.FileMode(v.Secret.DefaultMode))
	case v.ConfigMap != nil:
		return path, true, keys(path, k.configMaps[v.ConfigMap.Name], 0o644)
	case v.EmptyDir != nil:
		return path, false, os.MkdirAll(path, 0o777)
	}
	return path, false, fmt.Errorf("volume %s is of no kind known here", v.Name)
}

func hostPath(path, kind string) error {
	if strings.Contains(path, "/sys/fs/") {
		// The kernel has made these folders on every node; what this machine has
		// mounted there is its own, and none of a test's.
		return os.MkdirAll(path, 0o755)
	}
	info, err := os.Stat(path)
	dir, create := strings.HasPrefix(kind, "Directory"), strings.HasSuffix(kind, "OrCreate")
	switch {
	case err == nil && info.IsDir() != dir:
		return fmt.Errorf("%s is not a %s", path, kind)
	case err == nil || !create:
		return err
	case dir:
		return os.MkdirAll(path, 0o755)
	}
	// As the kubelet does, it makes the file and not its folder; the lock's is
	// there on every node.
	return errors.Join(os.MkdirAll(filepath.Dir(path), 0o755), os.WriteFile(path, nil, 0o644))
}

// keys writes the files of a secret or config map.
func keys(dir string, content map[string][]byte, mode os.FileMode) error {
	if content == nil {
		return fmt.Errorf("%s: nobody has made this secret or config map", filepath.Base(dir))
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for name, data := range content {
		path := filepath.Join(dir, name)
		if err := errors.Join(os.WriteFile(path, data, mode), os.Chmod(path, mode)); err != nil {
			return err
		}
	}
	return nil
}
