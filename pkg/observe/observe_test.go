package observe

import (
	"bytes"
	"encoding/json"
	"os"
	"runtime/debug"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/sirupsen/logrus"
	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func TestLoggerWritesJSONWhereNobodyLooks(t *testing.T) {
	var out bytes.Buffer
	log, err := NewLogger(&out, "info", "auto")
	if err != nil {
		t.Fatal(err)
	}
	log.WithField(FieldTarget, "kas").Info("up\nand away")
	log.Debug("not at this level")
	var line map[string]any
	if err := json.Unmarshal(out.Bytes(), &line); err != nil {
		t.Fatalf("not one JSON line: %v\n%s", err, out.String())
	}
	if line["target"] != "kas" || line["msg"] != "up\nand away" || line["level"] != "info" {
		t.Errorf("line = %v", line)
	}
}

func TestLoggerWritesTextOnATerminal(t *testing.T) {
	pty, err := os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		t.Skipf("no pseudo terminal here: %v", err)
	}
	defer pty.Close()
	log, err := NewLogger(pty, "", "")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := log.Formatter.(*logrus.TextFormatter); !ok {
		t.Errorf("formatter on a terminal is %T", log.Formatter)
	}
	log, err = NewLogger(pty, "debug", "json")
	if err != nil {
		t.Fatal(err)
	}
	if _, ok := log.Formatter.(*logrus.JSONFormatter); !ok || log.Level != logrus.DebugLevel {
		t.Errorf("asked for json and debug: %T %v", log.Formatter, log.Level)
	}
}

func TestLoggerRefusesWhatItDoesNotKnow(t *testing.T) {
	if _, err := NewLogger(&bytes.Buffer{}, "loud", "text"); err == nil || !strings.Contains(err.Error(), "debug, info, warn or error") {
		t.Errorf("level: %v", err)
	}
	if _, err := NewLogger(&bytes.Buffer{}, "info", "xml"); err == nil || !strings.Contains(err.Error(), "auto, text or json") {
		t.Errorf("format: %v", err)
	}
}

func TestTextIsFitForOneField(t *testing.T) {
	for in, want := range map[string]string{
		"kubelet":              "kubelet",
		"é\n\x01":              `é\n\x01`,
		"a\x1b[31mred":         `a\x1b[31mred`,
		"say \"hi\"":           `say "hi"`,
		"back\\slash":          `back\\slash`,
		"right\u202eleft":      `right\u202eleft`,
		"\xff\xfe":             `\xff\xfe`,
		"two\u2028lines\u0085": `two\u2028lines\u0085`,
	} {
		if got := Text(in); got != want {
			t.Errorf("Text(%q) = %s, want %s", in, got, want)
		}
	}
	long := strings.Repeat("é", MaxText)
	if got := Text(long); got != strings.Repeat("é", MaxText/2)+"…" {
		t.Errorf("long text became %q", got)
	}
	if got := Text("x" + long); !utf8.ValidString(got) || strings.Contains(got, `\x`) {
		t.Errorf("a character was cut in two: %q", got)
	}
	if got := Text(strings.Repeat("\x80", 10*MaxText)); len(got) > 4*MaxText+len("…") {
		t.Errorf("%d bytes of escapes", len(got))
	}
}

func TestVersionFromTheLinkerOrTheCheckout(t *testing.T) {
	if Version == "" || Build().Version != Version || Build().Go == "" {
		t.Errorf("Build() = %+v, Version = %q", Build(), Version)
	}
	v, c := fromBuildInfo(&debug.BuildInfo{
		Main:     debug.Module{Version: "v1.2.3"},
		Settings: []debug.BuildSetting{{Key: "vcs.revision", Value: "abc"}},
	})
	if v != "v1.2.3" || c != "abc" {
		t.Errorf("version %q commit %q", v, c)
	}
	if v, _ := fromBuildInfo(&debug.BuildInfo{}); v != "(devel)" {
		t.Errorf("version of nothing is %q", v)
	}
}

func TestRegistryHoldsTheBuild(t *testing.T) {
	families, err := NewRegistry("server").Gather()
	if err != nil {
		t.Fatal(err)
	}
	names := map[string]bool{}
	for _, f := range families {
		names[f.GetName()] = true
	}
	for _, want := range []string{"kasway_server_build_info", "go_goroutines", "process_open_fds"} {
		if !names[want] {
			t.Errorf("no %s", want)
		}
	}
	var _ prometheus.Gatherer = NewRegistry("agent")
}
