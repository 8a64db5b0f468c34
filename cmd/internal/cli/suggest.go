package cli

import (
	"errors"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// suggestFlags makes c and every command below it answer a flag that it does
// not know with the one that was most likely meant.
func suggestFlags(c *cobra.Command) {
	c.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
		hint := ""
		var unknown *pflag.NotExistError
		if errors.As(err, &unknown) {
			if near := nearestFlag(c.Flags(), unknown.GetSpecifiedName()); near != "" {
				hint = ", did you mean --" + near + "?"
			}
		}
		return UsageErrorf("%w%s\nSee '%s --help'", err, hint, c.CommandPath())
	})
}

// nearestFlag returns the flag of the least distance to name, if a typing error
// explains it.
func nearestFlag(set *pflag.FlagSet, name string) (nearest string) {
	if len(name) > 64 { // nobody's typing error, and the distance is quadratic
		return ""
	}
	least := max(len(name)/3, 1) + 1
	set.VisitAll(func(f *pflag.Flag) {
		if d := distance(name, f.Name); d < least {
			least, nearest = d, f.Name
		}
	})
	return nearest
}

// distance counts the bytes to insert, drop, replace or swap with their
// neighbour to make b of a.
func distance(a, b string) int {
	d := make([][]int, len(a)+1)
	for i := range d {
		d[i] = make([]int, len(b)+1)
		d[i][0] = i
	}
	for j := range d[0] {
		d[0][j] = j
	}
	for i := 1; i <= len(a); i++ {
		for j := 1; j <= len(b); j++ {
			replace := d[i-1][j-1]
			if a[i-1] != b[j-1] {
				replace++
			}
			d[i][j] = min(replace, d[i-1][j]+1, d[i][j-1]+1)
			if i > 1 && j > 1 && a[i-1] == b[j-2] && a[i-2] == b[j-1] {
				d[i][j] = min(d[i][j], d[i-2][j-2]+1)
			}
		}
	}
	return d[len(a)][len(b)]
}
