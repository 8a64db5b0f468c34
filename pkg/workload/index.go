package workload

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/time/rate"
)

// Bounds of an Index: a container may make as many cgroups in its own as it
// likes. What is nearer to the root is looked at first, so it cannot hide others.
const (
	maxCgroups = 1 << 14
	maxDepth   = 16
	maxPath    = 1024 // bytes
	// maxGone bounds what is remembered of cgroups that are no more.
	maxGone = 4096
)

// Index finds cgroups of version 2 by their id, which is the inode of their
// directory, whatever namespaces the process and the one who asks are in. It
// is safe for concurrent use.
type Index struct {
	root  string
	walks *rate.Limiter // how often the tree is looked through

	walking sync.Mutex // held by whoever looks through the tree

	mu    sync.Mutex
	found map[uint64]Workload
	gone  map[uint64]struct{} // ids that a complete look has not found
}

// NewIndex makes an Index of the cgroups at and below the directory root: the
// hierarchy's root, or that of a node within it. It does not look yet.
func NewIndex(root string) (*Index, error) {
	var s unix.Statfs_t
	if err := unix.Statfs(root, &s); err != nil {
		return nil, fmt.Errorf("looking for cgroups at %s: %w", root, err)
	}
	if s.Type != unix.CGROUP2_SUPER_MAGIC {
		return nil, fmt.Errorf("looking for cgroups at %s: it is not in a cgroup file system of version 2", root)
	}
	return newIndex(root), nil
}

func newIndex(root string) *Index {
	return &Index{
		root:  root,
		walks: rate.NewLimiter(rate.Every(250*time.Millisecond), 8),
		found: map[uint64]Workload{}, gone: map[uint64]struct{}{},
	}
}

// Find returns the workload in the cgroup with that id. It looks through the
// tree if the id is new, four times a second at most, which takes milliseconds.
// known is false for a cgroup that was removed before anybody asked, that is
// outside of the root, or that could not be looked for yet.
func (x *Index) Find(id uint64) (w Workload, known bool) {
	if w, known, over := x.cached(id); known || over {
		return w, known
	}
	x.walking.Lock()
	defer x.walking.Unlock()
	// Whoever looked while we waited may have found it.
	if w, known, over := x.cached(id); known || over || !x.walks.Allow() {
		return w, known
	}
	seen, complete := walk(x.root)
	x.mu.Lock()
	defer x.mu.Unlock()
	x.keep(seen)
	w, known = x.found[id]
	if !known && complete {
		// Ids are not used again: it will never be there.
		if len(x.gone) >= maxGone {
			clear(x.gone)
		}
		x.gone[id] = struct{}{}
	}
	return w, known
}

// cached also says whether looking for id is of no use.
func (x *Index) cached(id uint64) (w Workload, known, over bool) {
	x.mu.Lock()
	defer x.mu.Unlock()
	w, known = x.found[id]
	_, over = x.gone[id]
	return w, known, over
}

// keep puts what was seen in the place of what was known. Cgroups that are no
// more stay known, as connections may outlive them, as long as there is room.
func (x *Index) keep(seen map[uint64]Workload) {
	for id, w := range x.found {
		if len(seen) >= 2*maxCgroups {
			break
		}
		if _, again := seen[id]; !again {
			seen[id] = w
		}
	}
	x.found = seen
}

// walk looks at one level after the other. complete says that no bound was met
// and nothing failed but what vanished meanwhile.
func walk(root string) (seen map[uint64]Workload, complete bool) {
	seen, complete = map[uint64]Workload{}, true
	level := []string{""}
	for depth := 0; len(level) > 0; depth++ {
		if depth > maxDepth {
			return seen, false
		}
		var next []string
		for _, path := range level {
			if len(seen) >= maxCgroups {
				return seen, false
			}
			id, below, err := look(root, path)
			switch {
			case errors.Is(err, fs.ErrNotExist), errors.Is(err, unix.ENODEV):
				continue // removed since its parent was read
			case err != nil:
				complete = false
				continue
			}
			seen[id] = Parse(orRoot(path))
			for _, name := range below {
				if len(path)+1+len(name) > maxPath {
					complete = false
					continue
				}
				next = append(next, path+"/"+name)
			}
		}
		level = next
	}
	return seen, complete
}

func orRoot(path string) string {
	if path == "" {
		return "/"
	}
	return path
}

// look returns a cgroup's id and the names of those directly below it.
func look(root, path string) (id uint64, below []string, err error) {
	info, err := os.Lstat(filepath.Join(root, path))
	if err != nil {
		return 0, nil, err
	}
	s := info.Sys().(*syscall.Stat_t)
	if s.Nlink <= 2 {
		return s.Ino, nil, nil // most cgroups have none below
	}
	entries, err := os.ReadDir(filepath.Join(root, path))
	for _, e := range entries {
		if e.IsDir() {
			below = append(below, e.Name())
		}
	}
	return s.Ino, below, err
}
