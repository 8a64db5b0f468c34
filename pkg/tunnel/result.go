package tunnel

import (
	"errors"
	"fmt"
	"strings"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// results ties what a dial function says to what travels. The code is for tools
// that know gRPC only; an agent reads the reason alone.
var results = []struct {
	sentinel error
	reason   string
	code     codes.Code
}{
	{dial.ErrRefused, tunnelpb.ReasonRefused, codes.Unavailable},
	{dial.ErrDenied, tunnelpb.ReasonDenied, codes.PermissionDenied},
	{dial.ErrUnreachable, tunnelpb.ReasonUnreachable, codes.Unavailable},
	{dial.ErrTimeout, tunnelpb.ReasonTimeout, codes.DeadlineExceeded},
	{dial.ErrNoUpstream, tunnelpb.ReasonNoUpstream, codes.Unavailable},
	{dial.ErrLimit, tunnelpb.ReasonLimit, codes.ResourceExhausted},
	{dial.ErrLost, tunnelpb.ReasonLost, codes.Aborted},
}

// hasReason reports whether err wraps a sentinel that can travel.
func hasReason(err error) bool {
	for _, r := range results {
		if errors.Is(err, r.sentinel) {
			return true
		}
	}
	return false
}

// maxText bounds the text of a status, which is for people.
const maxText = 512

// toStatus makes the final status of a stream that ended with err. An error of
// no known reason is LOST. The text of a denial is not passed on: it would tell
// the denied what the policy is.
func toStatus(err error) error {
	var bad *openError
	if errors.As(err, &bad) {
		return withReason(codes.InvalidArgument, tunnelpb.ReasonDenied, err.Error())
	}
	for _, r := range results {
		if errors.Is(err, r.sentinel) {
			text := err.Error()
			if r.reason == tunnelpb.ReasonDenied {
				text = r.sentinel.Error()
			}
			return withReason(r.code, r.reason, text)
		}
	}
	return withReason(codes.Aborted, tunnelpb.ReasonLost, fmt.Sprint(err))
}

func withReason(code codes.Code, reason, text string) error {
	s := status.New(code, truncate(strings.ToValidUTF8(text, "\uFFFD"), maxText))
	detailed, err := s.WithDetails(&errdetails.ErrorInfo{Domain: tunnelpb.Domain, Reason: reason})
	if err != nil {
		return s.Err()
	}
	return detailed.Err()
}

// reasonOf returns the reason in a final status, "" if it has none of ours.
func reasonOf(s *status.Status) string {
	for _, d := range s.Details() {
		if info, ok := d.(*errdetails.ErrorInfo); ok && info.GetDomain() == tunnelpb.Domain {
			return info.GetReason()
		}
	}
	return ""
}

// farError is what the far side said about the end of a stream.
type farError struct {
	sentinel error
	text     string
}

func (e *farError) Error() string { return "far side: " + e.text }
func (e *farError) Unwrap() error { return e.sentinel }

// fromStatus is the reverse of toStatus. Whatever carries no known reason means
// that the stream's path is gone.
func fromStatus(err error) error {
	s := status.Convert(err)
	reason := reasonOf(s)
	for _, r := range results {
		if r.reason == reason {
			return &farError{r.sentinel, s.Message()}
		}
	}
	if reason != "" {
		return &farError{dial.ErrLost, fmt.Sprintf("%s (reason %s)", s.Message(), reason)}
	}
	return &farError{dial.ErrLost, fmt.Sprintf("%s (%s)", s.Message(), s.Code())}
}

// label is the bounded name of an outcome for metrics: "ok", "reset" where one
// of the two ends reset the connection, or one of the reasons.
func label(err error) string {
	switch {
	case err == nil:
		return "ok"
	case errors.Is(err, errReset):
		return "reset"
	}
	for _, r := range results {
		if errors.Is(err, r.sentinel) {
			return strings.ToLower(r.reason)
		}
	}
	var abort *abortError
	if errors.As(err, &abort) {
		return "reset"
	}
	return "lost"
}
