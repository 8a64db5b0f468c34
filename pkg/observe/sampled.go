package observe

import (
	"sync"
	"time"

	"github.com/sirupsen/logrus"
)

// Sampled bounds how often one kind of line is logged, for lines that somebody
// else can cause at will. Make one per message, so that a flood of one does
// not hide another. Safe for concurrent use.
type Sampled struct {
	every time.Duration
	burst int
	now   func() time.Time

	mu         sync.Mutex
	tokens     int
	filled     time.Time
	suppressed int
}

// FieldSuppressed counts the lines left out since the last one of their kind.
const FieldSuppressed = "suppressed"

// NewSampled lets burst lines through at once, and one more each time that
// every has passed.
func NewSampled(every time.Duration, burst int) *Sampled {
	return &Sampled{every: every, burst: burst, now: time.Now, tokens: burst}
}

// Allow says whether a line may be logged now, and returns the logger for it:
// log itself, or log with FieldSuppressed if lines were left out before.
//
//	if log, ok := strangers.Allow(log); ok {
//		log.Warn("refused a stranger")
//	}
func (s *Sampled) Allow(log logrus.FieldLogger) (logrus.FieldLogger, bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.fill()
	if s.tokens == 0 {
		s.suppressed++
		return nil, false
	}
	s.tokens--
	if s.suppressed > 0 {
		log = log.WithField(FieldSuppressed, s.suppressed)
		s.suppressed = 0
	}
	return log, true
}

func (s *Sampled) fill() {
	now := s.now()
	if s.tokens >= s.burst || s.filled.IsZero() {
		s.filled = now
		return
	}
	if n := int(now.Sub(s.filled) / s.every); n > 0 {
		s.tokens = min(s.tokens+n, s.burst)
		s.filled = s.filled.Add(time.Duration(n) * s.every)
	}
}
