package dial

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"syscall"
)

// Why a connection could not be made, or ended. Callers branch on them with
// errors.Is; the text is for people and never travels as protocol.
var (
	ErrRefused     = errors.New("connection refused")
	ErrDenied      = errors.New("denied by policy")
	ErrUnreachable = errors.New("destination unreachable")
	ErrTimeout     = errors.New("timed out")
	// ErrNoUpstream: nobody behind the target's name could be dialled.
	ErrNoUpstream = errors.New("no upstream is up")
	// ErrNoLink: there is no link to a server at this moment.
	ErrNoLink = errors.New("no link to a server")
	ErrLimit  = errors.New("limit reached")
	// ErrLost: the connection was up and its path is gone.
	ErrLost = errors.New("connection lost")
)

// NotDialled reports whether err says that nothing was dialled and no byte was
// passed on, so that trying another way cannot duplicate anything.
func NotDialled(err error) bool {
	return errors.Is(err, ErrNoUpstream) || errors.Is(err, ErrNoLink) || errors.Is(err, ErrLimit)
}

// Classify wraps an error of the operating system with the sentinel that it
// stands for. An error that carries a sentinel already, or stands for none, is
// returned as it is.
func Classify(err error) error {
	if err == nil || isSentinel(err) {
		return err
	}
	switch {
	case errors.Is(err, syscall.ECONNREFUSED):
		return wrap(ErrRefused, err)
	case errors.Is(err, syscall.ENETUNREACH), errors.Is(err, syscall.EHOSTUNREACH),
		errors.Is(err, syscall.EADDRNOTAVAIL), errors.Is(err, syscall.EACCES), errors.Is(err, fs.ErrPermission):
		return wrap(ErrUnreachable, err)
	case errors.Is(err, context.DeadlineExceeded), errors.Is(err, os.ErrDeadlineExceeded), errors.Is(err, syscall.ETIMEDOUT):
		return wrap(ErrTimeout, err)
	case errors.Is(err, syscall.EMFILE), errors.Is(err, syscall.ENFILE):
		return wrap(ErrLimit, err)
	}
	var dns *net.DNSError
	if errors.As(err, &dns) {
		if dns.IsTimeout {
			return wrap(ErrTimeout, err)
		}
		return wrap(ErrUnreachable, err)
	}
	var timeout net.Error
	if errors.As(err, &timeout) && timeout.Timeout() {
		return wrap(ErrTimeout, err)
	}
	return err
}

func isSentinel(err error) bool {
	for _, s := range []error{ErrRefused, ErrDenied, ErrUnreachable, ErrTimeout, ErrNoUpstream, ErrNoLink, ErrLimit, ErrLost} {
		if errors.Is(err, s) {
			return true
		}
	}
	return false
}

// reason joins a sentinel with the error it was derived from; both are found
// by errors.Is.
type reason struct{ sentinel, cause error }

func wrap(sentinel, cause error) error { return &reason{sentinel, cause} }

func (r *reason) Error() string   { return r.sentinel.Error() + ": " + r.cause.Error() }
func (r *reason) Unwrap() []error { return []error{r.sentinel, r.cause} }
