package config

import (
	"maps"
	"slices"
	"strings"
)

// suggest proposes the known field nearest to name, if one is near enough to
// have been meant. It ends in the mark that the rest of the sentence needs.
func suggest(name string, f fields) string {
	if len(name) > 64 {
		return ";"
	}
	best, nearest := "", max(len(name)/3, 2)+1
	for _, known := range slices.Sorted(maps.Keys(f)) {
		if n := distance(strings.ToLower(name), strings.ToLower(known)); n < nearest {
			best, nearest = known, n
		}
	}
	if best == "" {
		return ";"
	}
	return "; did you mean " + best + "?"
}

// distance counts the bytes to insert, drop or replace to make b of a.
func distance(a, b string) int {
	next := make([]int, len(b)+1)
	for j := range next {
		next[j] = j
	}
	for i := range len(a) {
		row := next
		next = make([]int, len(b)+1)
		next[0] = i + 1
		for j := range len(b) {
			cost := row[j]
			if a[i] != b[j] {
				cost++
			}
			next[j+1] = min(cost, row[j+1]+1, next[j]+1)
		}
	}
	return next[len(b)]
}
