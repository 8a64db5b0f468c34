package observe

import (
	"runtime"
	"runtime/debug"
)

// Version is this binary's version. The linker sets it
// (-X github.com/kasway/kasway/pkg/observe.Version=v1.2.3); without that it is
// what the Go tool knows about the checkout. It does not change after init.
var Version string

// Commit is the source revision, empty if the Go tool does not know it.
var Commit string

func init() {
	info, ok := debug.ReadBuildInfo()
	if !ok {
		info = &debug.BuildInfo{}
	}
	version, commit := fromBuildInfo(info)
	if Version == "" {
		Version = version
	}
	if Commit == "" {
		Commit = commit
	}
}

func fromBuildInfo(info *debug.BuildInfo) (version, commit string) {
	for _, s := range info.Settings {
		if s.Key == "vcs.revision" {
			commit = s.Value
		}
	}
	if version = info.Main.Version; version == "" {
		version = "(devel)"
	}
	return version, commit
}

// BuildInfo describes a binary, for `version` and its JSON.
type BuildInfo struct {
	Version string `json:"version"`
	Commit  string `json:"commit,omitempty"`
	Go      string `json:"go"`
	OS      string `json:"os"`
	Arch    string `json:"arch"`
}

// Build returns what is known about this binary.
func Build() BuildInfo {
	return BuildInfo{Version: Version, Commit: Commit, Go: runtime.Version(), OS: runtime.GOOS, Arch: runtime.GOARCH}
}
