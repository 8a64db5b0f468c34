package upstream

import (
	"context"
	"errors"
	"strings"

	"github.com/kasway/kasway/pkg/dial"
)

// failure is the error of a dial that failed at every address.
type failure struct {
	name   string
	causes []error
}

// err returns f, or what the guard said if it denied every address: that will
// be so on every other server too.
func (f *failure) err() error {
	for _, c := range f.causes {
		if !errors.Is(c, dial.ErrDenied) {
			return f
		}
	}
	return errors.Join(f.causes...)
}

// Error implements error.
func (f *failure) Error() string {
	texts := make([]string, len(f.causes))
	for i, c := range f.causes {
		texts[i] = c.Error()
	}
	return dial.ErrNoUpstream.Error() + ": " + f.name + ": " + strings.Join(texts, "; ")
}

// Unwrap makes this a dial.ErrNoUpstream and no other sentinel: an agent tries
// its next server after this one, and would not after dial.ErrRefused.
func (f *failure) Unwrap() error { return dial.ErrNoUpstream }

// As finds the causes by their types; a guard looks for its denials.
func (f *failure) As(target any) bool {
	for _, c := range f.causes {
		if errors.As(c, target) {
			return true
		}
	}
	return false
}

// result names an outcome for metrics and logs: a closed set.
func result(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, dial.ErrDenied):
		return "denied"
	case errors.Is(err, context.Canceled):
		return "abandoned"
	case errors.Is(err, dial.ErrRefused):
		return "refused"
	case errors.Is(err, dial.ErrTimeout):
		return "timeout"
	case errors.Is(err, dial.ErrUnreachable):
		return "unreachable"
	case errors.Is(err, dial.ErrLimit):
		return "limit"
	}
	return "other"
}
