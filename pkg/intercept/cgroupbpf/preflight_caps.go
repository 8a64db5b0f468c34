package cgroupbpf

import "golang.org/x/sys/unix"

// mayMount says whether this process may mount file systems.
func mayMount() bool { return capable(unix.CAP_SYS_ADMIN) }

// capable says whether a capability is in effect. It tells which of several is
// missing, which the kernel's EPERM does not; only the kernel decides.
func capable(c int) bool {
	h := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&h, &data[0]); err != nil {
		return false
	}
	return data[c/32].Effective&(1<<(c%32)) != 0
}
