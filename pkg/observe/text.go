package observe

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// MaxText bounds one piece of text from elsewhere in a log line, in bytes
// before escaping.
const MaxText = 200

// Text makes s, which somebody else wrote, fit for one field of one log line:
// no more than MaxText bytes of it, cut between characters, and everything
// that a terminal or a log reader could take for more than text escaped as Go
// would write it in a string.
func Text(s string) string {
	cut := len(s) > MaxText
	if cut {
		n := MaxText
		for n > MaxText-utf8.UTFMax+1 && !utf8.RuneStart(s[n]) {
			n--
		}
		s = s[:n]
	}
	s = strconv.QuoteToGraphic(s)
	// A field is not a Go string: its own quotes need no escape.
	s = strings.ReplaceAll(s[1:len(s)-1], `\"`, `"`)
	if cut {
		s += "…"
	}
	return s
}
