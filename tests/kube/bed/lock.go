package bed

import (
	"fmt"
	"os"
	"syscall"
)

// lockFile is machine-wide, as the names of network namespaces are.
const lockFile = "/run/kasway-kube.lock"

// Lock waits until no other run has a bed, and returns what ends ours. A
// process that dies gives it up.
func Lock() (unlock func(), err error) { return lock(lockFile) }

func lock(file string) (unlock func(), err error) {
	for {
		f, err := os.OpenFile(file, os.O_CREATE|os.O_RDWR, 0o600)
		if err != nil {
			return nil, err
		}
		if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX); err != nil {
			return nil, fmt.Errorf("locking %s: %w", file, err)
		}
		// The former owner removes the file before it unlocks: what we hold is
		// then a file that nobody else can find.
		mine, err1 := f.Stat()
		named, err2 := os.Stat(file)
		if err1 == nil && err2 == nil && os.SameFile(mine, named) {
			return func() {
				_ = os.Remove(file) // the next owner makes it anew, or finds it
				f.Close()
			}, nil
		}
		f.Close()
	}
}
