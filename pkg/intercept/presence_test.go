package intercept

import (
	"slices"
	"testing"
)

func TestPresence(t *testing.T) {
	a, err := Announce("gen1")
	if err != nil {
		t.Fatal(err)
	}
	b, err := Announce("gen2")
	if err != nil {
		t.Fatal(err)
	}
	present := func() []string {
		t.Helper()
		all, err := Present()
		if err != nil {
			t.Fatal(err)
		}
		return slices.Sorted(slices.Values(slices.DeleteFunc(all, func(g string) bool { return g != "gen1" && g != "gen2" })))
	}
	if got := present(); !slices.Equal(got, []string{"gen1", "gen2"}) {
		t.Errorf("present are %v", got)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if got := present(); !slices.Equal(got, []string{"gen2"}) {
		t.Errorf("after the end of one, present are %v", got)
	}
	if err := b.Close(); err != nil {
		t.Error(err)
	}
	if got := present(); len(got) > 0 {
		t.Errorf("after the end of both, present are %v", got)
	}
}
