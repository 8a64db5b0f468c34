package bed

import (
	"context"
	"io"
	"os/exec"
)

// Kubectl is kubectl of the administrator, inside the control plane.
func (b *Bed) Kubectl(ctx context.Context, stdin io.Reader, args ...string) *exec.Cmd {
	argv := place{netns: nsCP}.argv(append([]string{b.bin.Hyperkube, "kubectl", "--kubeconfig", b.Path("pki/admin.kubeconfig"),
		"--cache-dir", b.Path("kubectl")}, args...))
	cmd := exec.CommandContext(ctx, argv[0], argv[1:]...)
	cmd.Stdin = stdin
	return cmd
}
