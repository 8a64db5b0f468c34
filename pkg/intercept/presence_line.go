package intercept

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"
)

// MaxLine bounds a line between agents, its end included.
const MaxLine = 128

// linePrefix is the protocol and its version.
const linePrefix = "kasway/1 "

// The verbs of a Line: see presencePrefix for what they mean.
const (
	VerbStandDown = "stand-down"
	VerbListeners = "listeners"
	VerbYes       = "yes"
	VerbNo        = "no"
)

// Line is what one agent says to another.
type Line struct {
	Verb string
	// Generation is the speaker's.
	Generation string
	// Mode and Stamp are VerbStandDown's: how the speaker diverts, and since
	// when in nanoseconds of CLOCK_BOOTTIME.
	Mode  string
	Stamp int64
	// Word is why, with VerbNo.
	Word string
}

// Newer says whether the agent that has said l is newer than one with this
// generation and stamp.
func (l Line) Newer(generation string, stamp int64) bool {
	return l.Stamp > stamp || l.Stamp == stamp && l.Generation > generation
}

// String is l with its end, as ParseLine reads it.
func (l Line) String() string {
	words := []string{strings.TrimSpace(linePrefix), l.Verb, l.Generation}
	switch l.Verb {
	case VerbStandDown:
		words = append(words, l.Mode, strconv.FormatInt(l.Stamp, 10))
	case VerbNo:
		words = append(words, l.Word)
	}
	return strings.Join(words, " ") + "\n"
}

var errLine = errors.New("not a line of an agent")

// ParseLine reads a line, its end included. It takes exactly what String makes.
func ParseLine(b []byte) (Line, error) {
	var l Line
	text, ok := strings.CutPrefix(string(b), linePrefix)
	if len(b) > MaxLine || !ok || !strings.HasSuffix(text, "\n") {
		return l, errLine
	}
	words := strings.Split(strings.TrimSuffix(text, "\n"), " ")
	if len(words) < 2 || !isGeneration(words[1]) {
		return l, errLine
	}
	l.Verb, l.Generation = words[0], words[1]
	rest := words[2:]
	switch {
	case l.Verb == VerbStandDown && len(rest) == 2 && isWord(rest[0]):
		n, err := strconv.ParseInt(rest[1], 10, 64)
		if err != nil || n < 0 {
			return Line{}, errLine
		}
		l.Mode, l.Stamp = rest[0], n
	case l.Verb == VerbNo && len(rest) == 1 && isWord(rest[0]):
		l.Word = rest[0]
	case (l.Verb == VerbListeners || l.Verb == VerbYes) && len(rest) == 0:
	default:
		return Line{}, errLine
	}
	if l.String() != string(b) {
		return Line{}, errLine // such as a number with a sign
	}
	return l, nil
}

// isGeneration says whether s may be the name of a generation.
func isGeneration(s string) bool {
	return len(s) > 0 && len(s) <= 32 && !strings.ContainsFunc(s, func(r rune) bool {
		return (r < 'a' || r > 'z') && (r < '0' || r > '9')
	})
}

func isWord(s string) bool {
	return len(s) > 0 && len(s) <= 32 && !strings.ContainsFunc(s, func(r rune) bool { return (r < 'a' || r > 'z') && r != '-' })
}

// hear reads one line, and nothing behind it; within 0 waits for as long as c
// lives.
func hear(c *net.UnixConn, within time.Duration) (Line, error) {
	if within > 0 {
		if err := c.SetReadDeadline(time.Now().Add(within)); err != nil {
			return Line{}, fmt.Errorf("reading from another agent: %w", err)
		}
	}
	b := make([]byte, MaxLine)
	n := 0
	for n == 0 || b[n-1] != '\n' {
		if n == len(b) {
			return Line{}, errLine
		}
		// What is said comes in one piece, and nothing is said after it.
		m, err := c.Read(b[n:])
		if err != nil {
			return Line{}, fmt.Errorf("reading from another agent: %w", err)
		}
		n += m
		if i := bytes.IndexByte(b[:n], '\n'); i >= 0 && i < n-1 {
			return Line{}, errLine
		}
	}
	if err := c.SetReadDeadline(time.Time{}); err != nil {
		return Line{}, fmt.Errorf("reading from another agent: %w", err)
	}
	return ParseLine(b[:n])
}
