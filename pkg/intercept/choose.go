package intercept

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// Candidate is one mode that may be chosen.
type Candidate struct {
	Name string
	// New makes the mode; an error skips it.
	New func() (Mode, error)
	// Cleanup removes everything that this mode ever installed, its guard
	// included; nil: there is nothing.
	Cleanup func(ctx context.Context) error
}

// ChooseConfig is what Choose needs.
type ChooseConfig struct {
	// Try are the candidates in order; a mode that was configured is the only
	// one.
	Try []Candidate
	// Others are modes that are not tried. What an earlier agent has left of
	// them, or of the modes skipped, must not act beside the chosen one, and is
	// removed once that is proven.
	Others []Candidate
	State  rules.State
	// Prove fails unless the applied State works: see SelfTest.
	Prove func(ctx context.Context, s rules.State) error
	// Beside says that another agent lives on this node. What it has installed,
	// in whatever mode, is then left alone: Sweep comes later. nil: never.
	Beside  func() bool
	Log     logrus.FieldLogger
	Metrics *Metrics
}

// Skipped is a candidate that was not chosen, and why.
type Skipped struct {
	Mode   string
	Err    error
	Remedy string
}

// Choice is the mode in force.
type Choice struct {
	Name    string
	Mode    Mode
	Skipped []Skipped
	// Notes are those of its preflight.
	Notes []string
}

// ChooseError says of every candidate why it could not be used. It is
// ErrPrivilege, or ErrNotSupported, only if all of them are.
type ChooseError struct{ Skipped []Skipped }

// Error implements error, with one line per candidate.
func (e *ChooseError) Error() string {
	var b strings.Builder
	b.WriteString("no interception mode can be used here")
	for _, s := range e.Skipped {
		fmt.Fprintf(&b, "\n  %s: %v", s.Mode, s.Err)
		if s.Remedy != "" {
			fmt.Fprintf(&b, " (%s)", s.Remedy)
		}
	}
	return b.String()
}

// Is implements the interface of errors.Is.
func (e *ChooseError) Is(target error) bool {
	if target != ErrPrivilege && target != ErrNotSupported || len(e.Skipped) == 0 {
		return false
	}
	for _, s := range e.Skipped {
		if !errors.Is(s.Err, target) {
			return false
		}
	}
	return true
}

// Choose applies cfg.State with the first candidate that can and that is proven
// by cfg.Prove; the caller closes it. A mode whose preflight is inconclusive is
// tried: the proof decides. If there is none the error is a *ChooseError.
func Choose(ctx context.Context, cfg ChooseConfig) (Choice, error) {
	cfg.Metrics = orUnregistered(cfg.Metrics)
	c := Choice{}
	for i, cand := range cfg.Try {
		mode, report, kind := cfg.try(ctx, cand, i == len(cfg.Try)-1)
		if mode == nil {
			c.Skipped = append(c.Skipped, Skipped{cand.Name, report.Err, report.Remedy})
			cfg.Metrics.modeSkipped.WithLabelValues(cand.Name, kind).Set(1)
			cfg.Log.WithFields(logrus.Fields{observe.FieldMode: cand.Name, "remedy": report.Remedy}).
				WithError(report.Err).Warn("interception mode skipped")
			continue
		}
		c.Name, c.Mode, c.Notes = cand.Name, mode, report.Notes
		cfg.Metrics.mode.WithLabelValues(c.Name).Set(1)
		cfg.Log.WithField(observe.FieldMode, c.Name).Info("interception mode chosen, self-test passed")
		for _, note := range c.Notes {
			cfg.Log.WithField(observe.FieldMode, c.Name).Info(note)
		}
		if !cfg.beside() {
			cfg.Sweep(ctx, c.Name)
		}
		return c, nil
	}
	return c, &ChooseError{c.Skipped}
}

// try returns a mode that works, or why there is none, and the kind of that
// reason for the metric.
func (cfg *ChooseConfig) try(ctx context.Context, cand Candidate, last bool) (Mode, Report, string) {
	mode, err := cand.New()
	if err != nil {
		return nil, Report{Err: err}, kindOf(err)
	}
	r := mode.Preflight(ctx)
	switch {
	case errors.Is(r.Err, ErrNotSupported), errors.Is(r.Err, ErrPrivilege):
		return nil, Report{Err: errors.Join(r.Err, mode.Close()), Remedy: r.Remedy}, kindOf(r.Err)
	case r.Err != nil:
		cfg.Log.WithField(observe.FieldMode, cand.Name).WithError(r.Err).Warn("preflight is inconclusive: trying it")
	}
	err = mode.Apply(ctx, cfg.State)
	if err == nil {
		if err = cfg.Prove(ctx, cfg.State); err == nil {
			return mode, r, ""
		}
		err = fmt.Errorf("installed, but it does not work: %w", err)
	}
	err = errors.Join(err, mode.Close())
	// Its guard would soon refuse what the next mode diverts. Where nothing
	// comes after it the guard stays, as it does when an agent dies.
	if !last && cand.Cleanup != nil && !cfg.beside() {
		err = errors.Join(err, cand.Cleanup(ctx))
	}
	return nil, Report{Err: err, Remedy: r.Remedy}, kindOf(err)
}

func (cfg *ChooseConfig) beside() bool { return cfg.Beside != nil && cfg.Beside() }

// Sweep removes what is left of the modes that are not in use, which are all
// but the one with this name. Choose has done so unless it was Beside another
// agent.
func (cfg *ChooseConfig) Sweep(ctx context.Context, inUse string) {
	for _, c := range slices.Concat(cfg.Try, cfg.Others) {
		if c.Cleanup == nil || c.Name == inUse {
			continue
		}
		if err := c.Cleanup(ctx); err != nil {
			cfg.Log.WithField(observe.FieldMode, c.Name).WithError(err).
				Warn("leftovers of a mode not in use could not be removed, or looked for: a guard of its would refuse connects")
		}
	}
}

func kindOf(err error) string {
	switch {
	case errors.Is(err, ErrNotSupported):
		return "not_supported"
	case errors.Is(err, ErrPrivilege):
		return "privilege"
	default:
		return "failed"
	}
}
