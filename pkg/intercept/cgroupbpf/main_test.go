package cgroupbpf_test

import (
	"errors"
	"net/netip"
	"os"
	"testing"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"

	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/intercept/cgroupbpf"
	"github.com/kasway/kasway/pkg/intercept/intercepttest"
	"github.com/kasway/kasway/tests/netns"
)

// modern is the mode as it is, ancient the one of the oldest kernels, blind that
// of a kernel without BTF.
var (
	modern  = factory("ebpf", func() error { return nil })
	ancient = factory("ebpf-ancient", func() error { cgroupbpf.PlayOldKernel(); return nil })
	blind   = factory("ebpf-blind", hideBTF)
)

// hideBTF covers the kernel's BTF in the mount namespace of the lab's agents.
func hideBTF() error {
	const btf = "/sys/kernel/btf"
	if _, err := os.Stat(btf); err != nil {
		return nil // this kernel has none
	}
	if err := unix.Mount("kasway-lab", btf, "tmpfs", 0, ""); err != nil {
		return err
	}
	if _, err := os.Stat(btf + "/vmlinux"); err == nil {
		return errors.New("the kernel's BTF is still there")
	}
	return nil
}

func factory(name string, before func() error) intercepttest.Factory {
	return intercepttest.Factory{
		Name: name,
		New: func(log logrus.FieldLogger) (intercept.Mode, error) {
			if err := before(); err != nil {
				return nil, err
			}
			return cgroupbpf.New(cgroupbpf.Config{Cgroup: intercepttest.NodeCgroup(), Log: log}), nil
		},
		Cleanup: cgroupbpf.Cleanup,
	}
}

func TestMain(m *testing.M) {
	if spec := os.Getenv(rawEnv); spec != "" {
		os.Exit(rawClient(spec))
	}
	cgroupbpf.SetFlood(func(from *netns.Host, source netip.Addr, to netip.AddrPort, connects int) error {
		_, err := connectFrom(from, socketSpec{To: to, Source: source, Port: 1024, Flood: connects})
		return err
	})
	intercepttest.Main(m, modern, ancient, blind)
}
