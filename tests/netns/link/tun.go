package link

import (
	"fmt"
	"os"

	"golang.org/x/sys/unix"
)

// headerSize is that of struct virtio_net_hdr, which stands before each packet
// and passes from one device to the other as it is: it says what the sending
// host has left to a network card, checksums and segmentation.
const headerSize = 10

// largest is a header and the largest segment.
const largest = headerSize + 1<<16

// openTUN makes a TUN device in the calling thread's namespace. With offload
// the host hands over segments larger than the MTU.
func openTUN(name string, offload bool) (*os.File, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil, fmt.Errorf("opening /dev/net/tun: %w", err)
	}
	if err := attach(fd, name, offload); err != nil {
		_ = unix.Close(fd)
		return nil, err
	}
	// Only now: a descriptor without a device cannot be polled.
	return os.NewFile(uintptr(fd), name), nil
}

func attach(fd int, name string, offload bool) error {
	req, err := unix.NewIfreq(name)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_TUN | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, req); err != nil {
		return fmt.Errorf("making %s: %w", name, err)
	}
	if !offload {
		return nil
	}
	if err := unix.IoctlSetInt(fd, unix.TUNSETOFFLOAD, unix.TUN_F_CSUM|unix.TUN_F_TSO4|unix.TUN_F_TSO6); err != nil {
		return fmt.Errorf("offload of %s: %w", name, err)
	}
	return nil
}
