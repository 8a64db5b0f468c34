package cgroupbpf

import (
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"syscall"
	"testing"

	"github.com/cilium/ebpf"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/tests/netns"
)

// loadsEnv makes the test below the process that has few capabilities.
const loadsEnv = "KASWAY_TEST_LOADS"

// TestLoadsWithTwoCapabilities: CAP_BPF and CAP_NET_ADMIN, all that manifests
// ask for, are enough for the verifier and for every helper.
func TestLoadsWithTwoCapabilities(t *testing.T) {
	if os.Getenv(loadsEnv) != "" {
		if capable(unix.CAP_PERFMON) || capable(unix.CAP_SYS_ADMIN) || !capable(unix.CAP_BPF) {
			t.Fatal("this process has other capabilities")
		}
		in, err := newInstalled(Root{}, "", 1)
		if err != nil {
			t.Fatal(err)
		}
		info, err := in.objects.KwConnect4.Info()
		if err != nil {
			t.Fatal(err)
		}
		id, _ := info.ID()
		if _, err := ebpf.NewProgramFromID(id); !errors.Is(err, fs.ErrPermission) || !ours(id) {
			t.Errorf("program %d of this very process: %v, ours %t; want that nobody may look, and ours", id, err, ours(id))
		}
		if err := in.close(); err != nil {
			t.Fatal(err)
		}
		return
	}
	netns.Require(t)
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	cmd.Env = append(os.Environ(), loadsEnv+"=1")
	const nobody = 65534
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Credential:  &syscall.Credential{Uid: nobody, Gid: nobody},
		AmbientCaps: []uintptr{unix.CAP_BPF, unix.CAP_NET_ADMIN},
	}
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
}
