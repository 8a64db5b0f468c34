// Package link is a long, thin or lossy path between two hosts of a
// laboratory: IP packets between two TUN devices, delayed, paced, dropped and
// delivered in user space. Being below TCP it acknowledges nothing itself, as
// a relay of connections would.
package link

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"time"

	"github.com/kasway/kasway/tests/netns"
)

// End is where a link ends: a TUN device with these addresses (valid ones).
type End struct {
	Host         *netns.Host
	Addr4, Addr6 netip.Prefix
}

// Config describes a link; both directions are alike.
type Config struct {
	A, B End
	// Device is the name on both hosts; "" means "tun0".
	Device string
	// Delay is that of one direction: half a round trip.
	Delay time.Duration
	// Rate in bits per second; 0 is as fast as the machine.
	Rate float64
	// Queue is how many bytes may wait for their turn at Rate before the next
	// packet is dropped; 0 means one round trip's worth, and 256 KiB at least.
	Queue int
	// Loss is the share of packets that is lost, 0 to 1, chosen by Seed. With
	// a loss packets are of MTU size; without, the hosts hand over segments of
	// up to 64 KiB, as network cards take them.
	Loss float64
	Seed uint64
	// MTU of the devices; 0 means 1500.
	MTU int
}

// Counts are those of one direction. Lost by chance, dropped for want of room
// in the queue, cut while the link was down.
type Counts struct{ Packets, Bytes, Lost, Dropped, Cut uint64 }

// Link is a running link. Its methods may be called concurrently.
type Link struct {
	ab, ba *direction
	files  [2]*os.File
	wg     sync.WaitGroup
}

// New makes the devices and starts carrying. The caller closes it; the devices
// go with it. Where a round trip holds more than a mebibyte both hosts get
// TCP buffers that do not limit a connection below the rate.
func New(cfg Config) (*Link, error) {
	cfg = cfg.withDefaults()
	a, err := device(cfg, cfg.A)
	if err != nil {
		return nil, err
	}
	b, err := device(cfg, cfg.B)
	if err != nil {
		return nil, errors.Join(err, a.Close())
	}
	l := &Link{files: [2]*os.File{a, b}, ab: newDirection(cfg, 1), ba: newDirection(cfg, 2)}
	l.wg.Go(func() { l.ab.read(a) })
	l.wg.Go(func() { l.ab.write(b) })
	l.wg.Go(func() { l.ba.read(b) })
	l.wg.Go(func() { l.ba.write(a) })
	return l, nil
}

func (c Config) withDefaults() Config {
	if c.Device == "" {
		c.Device = "tun0"
	}
	if c.MTU == 0 {
		c.MTU = 1500
	}
	if c.Queue == 0 {
		c.Queue = max(256<<10, c.product())
	}
	return c
}

// product is how many bytes fill a round trip.
func (c Config) product() int { return int(c.Rate / 8 * (2 * c.Delay).Seconds()) }

// Counts are those of the packets from A to B, and from B to A.
func (l *Link) Counts() (ab, ba Counts) { return l.ab.snapshot(), l.ba.snapshot() }

// SetDown makes the link swallow everything, or carry again: a dead path
// about which nobody tells the hosts.
func (l *Link) SetDown(down bool) {
	l.ab.setDown(down)
	l.ba.setDown(down)
}

// Close takes the devices away and waits for the link's goroutines.
func (l *Link) Close() error {
	l.ab.close()
	l.ba.close()
	err := errors.Join(l.files[0].Close(), l.files[1].Close())
	l.wg.Wait()
	return err
}

// device makes, names and raises one TUN device.
func device(cfg Config, end End) (f *os.File, err error) {
	if err := end.Host.Do(func() (err error) {
		f, err = openTUN(cfg.Device, cfg.Loss == 0)
		return err
	}); err != nil {
		return nil, fmt.Errorf("link: device on %s: %w", end.Host.Label, err)
	}
	if err := configure(cfg, end); err != nil {
		return nil, errors.Join(fmt.Errorf("link: device on %s: %w", end.Host.Label, err), f.Close())
	}
	return f, nil
}

func configure(cfg Config, end End) error {
	nl := end.Host.Netlink()
	dev, err := nl.LinkByName(cfg.Device)
	if err != nil {
		return err
	}
	// A burst that is read a moment late must not be lost before it is ours.
	const backlog = 4096
	err = errors.Join(nl.LinkSetMTU(dev, cfg.MTU), nl.LinkSetTxQLen(dev, backlog), nl.LinkSetUp(dev))
	for _, p := range []netip.Prefix{end.Addr4, end.Addr6} {
		if p.IsValid() {
			err = errors.Join(err, end.Host.AddAddr(cfg.Device, p))
		}
	}
	if need := cfg.product(); need > 1<<20 {
		for _, name := range []string{"net/ipv4/tcp_rmem", "net/ipv4/tcp_wmem"} {
			// The kernel counts its own overhead as well, and halves what it advertises.
			err = errors.Join(err, end.Host.Sysctl(name, "4096 262144 "+strconv.Itoa(8*need)))
		}
	}
	return err
}
