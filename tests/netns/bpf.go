package netns

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// bpfKind is how one kind of BPF object is enumerated (enum bpf_cmd), and
// where its info structure holds a name.
type bpfKind struct {
	name          string
	next, byID    int
	nameAt, words int
}

// The names of struct bpf_prog_info and bpf_map_info stand at fixed offsets
// (include/uapi/linux/bpf.h); links have none.
var bpfKinds = []bpfKind{
	{"prog", unix.BPF_PROG_GET_NEXT_ID, unix.BPF_PROG_GET_FD_BY_ID, 64, 232 / 8},
	{"map", unix.BPF_MAP_GET_NEXT_ID, unix.BPF_MAP_GET_FD_BY_ID, 24, 88 / 8},
	{"link", unix.BPF_LINK_GET_NEXT_ID, unix.BPF_LINK_GET_FD_BY_ID, -1, 0},
}

// bpfObjects lists the objects whose names have one of the prefixes. Ids are
// never used twice, so they tell an old object from a new one of its name.
func bpfObjects(prefixes []string) (lines []string, err error) {
	for _, k := range bpfKinds {
		for id := uint32(0); ; {
			id, err = bpfNext(k.next, id)
			if errors.Is(err, unix.ENOENT) {
				break
			}
			if err != nil {
				return nil, fmt.Errorf("netns: listing BPF %ss: %w", k.name, err)
			}
			name, err := bpfName(k, id)
			if errors.Is(err, unix.ENOENT) {
				continue // gone meanwhile
			}
			if err != nil {
				return nil, fmt.Errorf("netns: BPF %s %d: %w", k.name, id, err)
			}
			if slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(name, p) }) {
				lines = append(lines, fmt.Sprintf("%s %d %s", k.name, id, name))
			}
		}
	}
	return lines, nil
}

// bpfAttr is the part of union bpf_attr used by the *_ID commands.
type bpfAttr struct{ id, nextID, flags uint32 }

func bpfNext(cmd int, after uint32) (uint32, error) {
	a := bpfAttr{id: after}
	if _, _, e := unix.Syscall(unix.SYS_BPF, uintptr(cmd), uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a)); e != 0 {
		return 0, e
	}
	return a.nextID, nil
}

func bpfName(k bpfKind, id uint32) (string, error) {
	if k.nameAt < 0 {
		return "", nil
	}
	a := bpfAttr{id: id}
	fd, _, e := unix.Syscall(unix.SYS_BPF, uintptr(k.byID), uintptr(unsafe.Pointer(&a)), unsafe.Sizeof(a))
	if e != 0 {
		return "", e
	}
	defer func() { _ = unix.Close(int(fd)) }()
	info := make([]uint64, k.words) // for its alignment
	attr := struct {
		fd, length uint32
		info       unsafe.Pointer
	}{uint32(fd), uint32(len(info) * 8), unsafe.Pointer(&info[0])}
	if _, _, e := unix.Syscall(unix.SYS_BPF, unix.BPF_OBJ_GET_INFO_BY_FD, uintptr(unsafe.Pointer(&attr)), unsafe.Sizeof(attr)); e != 0 {
		return "", e
	}
	raw := unsafe.Slice((*byte)(unsafe.Pointer(&info[0])), len(info)*8)[k.nameAt : k.nameAt+unix.BPF_OBJ_NAME_LEN]
	name, _, _ := bytes.Cut(raw, []byte{0})
	return string(name), nil
}
