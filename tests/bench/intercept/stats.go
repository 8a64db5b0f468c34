package main

import (
	"slices"
)

// median of at least one value.
func median(v []float64) float64 { return quantile(v, 0.5) }

// quantile interpolates; q is 0 to 1.
func quantile(v []float64, q float64) float64 {
	s := slices.Clone(v)
	slices.Sort(s)
	at := q * float64(len(s)-1)
	i := int(at)
	if i+1 == len(s) {
		return s[i]
	}
	return s[i] + (at-float64(i))*(s[i+1]-s[i])
}

// pairs are what the same measure gave in each round without a mode and with it.
type pairs struct{ Off, On []float64 }

// ratio is the median of the rounds' ratios of on to off, and how far apart the
// middle half of them is: the noise.
func (p pairs) ratio() (mid, noise float64) {
	r := make([]float64, len(p.Off))
	for i := range r {
		r[i] = p.On[i] / p.Off[i]
	}
	return median(r), quantile(r, 0.75) - quantile(r, 0.25)
}

// delta is the median of the rounds' differences, on less off, and its noise.
func (p pairs) delta() (mid, noise float64) {
	d := make([]float64, len(p.Off))
	for i := range d {
		d[i] = p.On[i] - p.Off[i]
	}
	return median(d), quantile(d, 0.75) - quantile(d, 0.25)
}
