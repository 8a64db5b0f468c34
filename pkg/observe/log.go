package observe

import (
	"fmt"
	"io"
	"os"
	"time"

	"github.com/sirupsen/logrus"
	"golang.org/x/sys/unix"
)

// The formats of a log.
const (
	FormatAuto = "auto" // text on a terminal, JSON otherwise
	FormatText = "text"
	FormatJSON = "json"
)

// NewLogger makes a logger that writes to w. level is debug, info, warn or
// error, format one of the Format constants; both may be empty (info, auto).
func NewLogger(w io.Writer, level, format string) (*logrus.Logger, error) {
	log := logrus.New()
	log.SetOutput(w)
	switch level {
	case "", "info":
		log.SetLevel(logrus.InfoLevel)
	case "debug":
		log.SetLevel(logrus.DebugLevel)
	case "warn":
		log.SetLevel(logrus.WarnLevel)
	case "error":
		log.SetLevel(logrus.ErrorLevel)
	default:
		return nil, fmt.Errorf("log level %q: use debug, info, warn or error", level)
	}
	terminal := isTerminal(w)
	switch format {
	case FormatText:
	case FormatJSON:
		terminal = false
	case "", FormatAuto:
		if !terminal {
			format = FormatJSON
		}
	default:
		return nil, fmt.Errorf("log format %q: use auto, text or json", format)
	}
	if format == FormatJSON {
		log.SetFormatter(&logrus.JSONFormatter{TimestampFormat: time.RFC3339Nano})
		return log, nil
	}
	log.SetFormatter(&logrus.TextFormatter{
		FullTimestamp:   true,
		TimestampFormat: "15:04:05.000",
		ForceColors:     terminal,
		DisableColors:   !terminal,
	})
	return log, nil
}

// isTerminal reports whether w is a terminal that a person may look at.
func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	_, err := unix.IoctlGetTermios(int(f.Fd()), unix.TCGETS)
	return err == nil
}
