package intercept

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/sirupsen/logrus"

	"github.com/kasway/kasway/pkg/observe"
	"github.com/kasway/kasway/pkg/rules"
)

// fakeMode writes down what is done with it.
type fakeMode struct {
	name   string
	diary  *[]string
	report Report
	apply  error
}

func (m *fakeMode) note(what string)                 { *m.diary = append(*m.diary, m.name+" "+what) }
func (m *fakeMode) Preflight(context.Context) Report { m.note("preflight"); return m.report }
func (m *fakeMode) Apply(context.Context, rules.State) error {
	m.note("apply")
	return m.apply
}
func (m *fakeMode) Verify(context.Context) ([]Damage, error) { return nil, nil }
func (m *fakeMode) Close() error                             { m.note("close"); return nil }

func (m *fakeMode) candidate() Candidate {
	return Candidate{
		Name:    m.name,
		New:     func() (Mode, error) { m.note("new"); return m, nil },
		Cleanup: func(context.Context) error { m.note("cleanup"); return nil },
	}
}

var errProof = errors.New("nothing arrived")

// choose runs Choose over modes, of which the proof finds only works to work.
func choose(t *testing.T, diary *[]string, works string, modes ...*fakeMode) (Choice, values, error) {
	t.Helper()
	log, _ := logs(t)
	m, v := metrics(t)
	cfg := ChooseConfig{Log: log, Metrics: m}
	for _, m := range modes {
		m.diary = diary
		cfg.Try = append(cfg.Try, m.candidate())
	}
	cfg.Others = []Candidate{(&fakeMode{name: "other", diary: diary}).candidate()}
	cfg.Prove = func(context.Context, rules.State) error {
		last := (*diary)[len(*diary)-1]
		if last == works+" apply" {
			return nil
		}
		return errProof
	}
	c, err := Choose(t.Context(), cfg)
	return c, v, err
}

func TestChooseTheFirstThatWorks(t *testing.T) {
	var diary []string
	c, v, err := choose(t, &diary, "c",
		&fakeMode{name: "a", report: NotSupported("load the module", "no sets")},
		&fakeMode{name: "b", report: Report{Remedy: "look at the firewall"}},
		&fakeMode{name: "c", report: Report{Err: errors.New("cannot tell"), Notes: []string{"a note"}}},
		&fakeMode{name: "d"})
	if err != nil || c.Name != "c" || !slices.Equal(c.Notes, []string{"a note"}) {
		t.Fatalf("%+v, %v", c, err)
	}
	want := []string{
		"a new", "a preflight", "a close",
		"b new", "b preflight", "b apply", "b close", "b cleanup",
		"c new", "c preflight", "c apply",
		"a cleanup", "b cleanup", "d cleanup", "other cleanup",
	}
	if !slices.Equal(diary, want) {
		t.Errorf("did %q\nwant %q", diary, want)
	}
	if len(c.Skipped) != 2 || !errors.Is(c.Skipped[0].Err, ErrNotSupported) || c.Skipped[0].Remedy != "load the module" || !errors.Is(c.Skipped[1].Err, errProof) {
		t.Errorf("skipped %+v", c.Skipped)
	}
	for _, key := range []string{"mode c", "mode_skipped a not_supported", "mode_skipped b failed"} {
		if v.of(key) != 1 {
			t.Errorf("metric %s is not 1", key)
		}
	}
}

// What a mode not in use has left may refuse every client: that it could not be
// removed is worth a warning, and no reason to give up the one that works.
func TestChooseWarnsOfLeftovers(t *testing.T) {
	var diary []string
	log, hook := logs(t)
	stuck := (&fakeMode{name: "stuck", diary: &diary}).candidate()
	stuck.Cleanup = func(context.Context) error { return errProof }
	c, err := Choose(t.Context(), ChooseConfig{
		Try: []Candidate{(&fakeMode{name: "a", diary: &diary}).candidate()}, Others: []Candidate{stuck},
		Prove: func(context.Context, rules.State) error { return nil }, Log: log,
	})
	if err != nil || c.Name != "a" {
		t.Fatalf("%+v, %v", c, err)
	}
	last := hook.LastEntry()
	logged, _ := last.Data[logrus.ErrorKey].(error)
	if last.Level != logrus.WarnLevel || last.Data[observe.FieldMode] != "stuck" || !errors.Is(logged, errProof) {
		t.Errorf("the last line is %v: %q %v", last.Level, last.Message, last.Data)
	}
}

// A configured mode is not replaced: its guard stays, as when an agent dies.
func TestChooseAConfiguredModeThatFails(t *testing.T) {
	var diary []string
	_, _, err := choose(t, &diary, "", &fakeMode{name: "a"})
	if err == nil || !strings.Contains(err.Error(), errProof.Error()) {
		t.Errorf("error %v", err)
	}
	if want := []string{"a new", "a preflight", "a apply", "a close"}; !slices.Equal(diary, want) {
		t.Errorf("did %q\nwant %q", diary, want)
	}
}

func TestChooseNone(t *testing.T) {
	privilege := Report{Err: ErrPrivilege, Remedy: "run as root"}
	var diary []string
	_, _, err := choose(t, &diary, "", &fakeMode{name: "a", report: privilege}, &fakeMode{name: "b", report: privilege})
	if !errors.Is(err, ErrPrivilege) {
		t.Errorf("%v is not ErrPrivilege though all are", err)
	}
	_, _, err = choose(t, &diary, "", &fakeMode{name: "a", report: privilege}, &fakeMode{name: "b", apply: errors.New("no such table")})
	if errors.Is(err, ErrPrivilege) {
		t.Errorf("%v is ErrPrivilege though one of them is not", err)
	}
	for _, has := range []string{"a: missing privilege", "run as root", "b: no such table"} {
		if !strings.Contains(err.Error(), has) {
			t.Errorf("%q does not say %q", err, has)
		}
	}
	var list *ChooseError
	if !errors.As(err, &list) || len(list.Skipped) != 2 {
		t.Errorf("%v is no list of reasons", err)
	}
}

func TestChooseModeThatCannotBeMade(t *testing.T) {
	log, _ := logs(t)
	_, err := Choose(t.Context(), ChooseConfig{Log: log, Try: []Candidate{{
		Name: "a", New: func() (Mode, error) { return nil, ErrNotSupported },
	}}})
	if !errors.Is(err, ErrNotSupported) {
		t.Errorf("%v, want ErrNotSupported", err)
	}
}
