package intercept

import (
	"fmt"
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// A dying process loses its files from the highest descriptor down: that of a
// listener is above those of all connections, and ends with the listener.
func TestListenersAreReleasedFirst(t *testing.T) {
	r := newRig(t, ServerConfig{Handle: echo})
	l := r.listeners.open[place{"kas", r.listeners.wanted[0].addr}]
	raw, err := l.tcp.SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var of unix.Stat_t
	if err := raw.Control(func(fd uintptr) { err = unix.Fstat(int(fd), &of) }); err != nil {
		t.Fatal(err)
	}
	socket := fmt.Sprintf("socket:[%d]", of.Ino)
	high := func() (n int) {
		for fd := FirstReleased; fd < FirstReleased+100; fd++ {
			if to, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", fd)); err == nil && to == socket {
				n++
			}
		}
		return n
	}
	if high() != 1 {
		t.Errorf("the listener is held by %d high descriptors", high())
	}
	r.listeners.Close()
	if high() != 0 {
		t.Error("a closed listener is still held")
	}
}
