package intercept

import (
	"math"
	"strings"
	"testing"
)

var goodLines = map[string]Line{
	"kasway/1 stand-down 0a1b nft 42\n": {Verb: VerbStandDown, Generation: "0a1b", Mode: "nft", Stamp: 42},
	"kasway/1 listeners gen2\n":         {Verb: VerbListeners, Generation: "gen2"},
	"kasway/1 yes a\n":                  {Verb: VerbYes, Generation: "a"},
	"kasway/1 no a some-reason\n":       {Verb: VerbNo, Generation: "a", Word: "some-reason"},
	"kasway/1 stand-down " + strings.Repeat("f", 32) + " " + strings.Repeat("m", 32) + " 9223372036854775807\n": {
		Verb: VerbStandDown, Generation: strings.Repeat("f", 32), Mode: strings.Repeat("m", 32), Stamp: math.MaxInt64},
}

func TestParseLine(t *testing.T) {
	for text, want := range goodLines {
		if got, err := ParseLine([]byte(text)); err != nil || got != want {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
		if got := want.String(); got != text {
			t.Errorf("%+v is %q", want, got)
		}
	}
	for _, text := range []string{
		"", "\n", "kasway/1 \n", "kasway/1 yes\n", "kasway/1 yes a", "kasway/1 yes a \n", "kasway/1  yes a\n", " kasway/1 yes a\n",
		"kasway/1 yes A\n", "kasway/1 yes a b\n", "kasway/1 no a\n", "kasway/1 no a B\n", "kasway/1 maybe a\n", "kasway/2 yes a\n",
		"kasway/1 stand-down a nft\n", "kasway/1 stand-down a nft -1\n", "kasway/1 stand-down a nft +1\n", "kasway/1 stand-down a nft 01\n",
		"kasway/1 stand-down a nft 9223372036854775808\n", "kasway/1 stand-down a nft 1 2\n", "kasway/1 stand-down a n.t 1\n",
		"kasway/1 yes a\nkasway/1 yes a\n", "kasway/1 yes a\r\n", "kasway/1 yes a\x00\n", "kasway/1 yes \xff\n",
		"kasway/1 yes " + strings.Repeat("a", 33) + "\n", "kasway/1 no a " + strings.Repeat("b", 200) + "\n",
	} {
		if got, err := ParseLine([]byte(text)); err == nil || got != (Line{}) && got.Mode != "" {
			t.Errorf("%q: %+v, %v", text, got, err)
		}
	}
}

func TestLine_Newer(t *testing.T) {
	l := Line{Generation: "b", Stamp: 5}
	for _, c := range []struct {
		generation string
		stamp      int64
		newer      bool
	}{{"c", 4, true}, {"a", 6, false}, {"a", 5, true}, {"c", 5, false}, {"b", 5, false}} {
		if got := l.Newer(c.generation, c.stamp); got != c.newer {
			t.Errorf("newer than %s at %d: %v", c.generation, c.stamp, got)
		}
	}
}

// What is read is what would have been said, and fits into what is read.
func FuzzParseLine(f *testing.F) {
	for text := range goodLines {
		f.Add([]byte(text))
	}
	f.Add([]byte("kasway/1 stand-down a nft +1\n"))
	f.Fuzz(func(t *testing.T, b []byte) {
		l, err := ParseLine(b)
		if err != nil {
			return
		}
		if l.String() != string(b) || len(b) > MaxLine || !isGeneration(l.Generation) {
			t.Errorf("%q is %+v", b, l)
		}
	})
}
