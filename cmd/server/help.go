package main

import (
	"errors"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/kasway/kasway/cmd/internal/cli"
)

// flagGroup is a headed part of a command's help.
type flagGroup struct {
	title string
	flags []string
}

// groupFlags makes c's help show its flags in groups, in the given order; a
// flag of no group is shown at the end, so that none is ever hidden.
func groupFlags(c *cobra.Command, groups ...flagGroup) {
	c.Flags().SortFlags = false
	c.SetUsageFunc(func(c *cobra.Command) error {
		var b strings.Builder
		b.WriteString("Usage:\n  " + c.UseLine() + "\n")
		if c.HasExample() {
			b.WriteString("\nExamples:\n" + c.Example + "\n")
		}
		rest := flagGroup{title: "Other"}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && !slices.ContainsFunc(groups, func(g flagGroup) bool { return slices.Contains(g.flags, f.Name) }) {
				rest.flags = append(rest.flags, f.Name)
			}
		})
		for _, g := range append(slices.Clone(groups), rest) {
			set := pflag.NewFlagSet(g.title, pflag.ContinueOnError)
			set.SortFlags = false
			for _, name := range g.flags {
				if f := c.Flags().Lookup(name); f != nil {
					set.AddFlag(f)
				}
			}
			if set.HasAvailableFlags() {
				b.WriteString("\n" + g.title + ":\n" + set.FlagUsagesWrapped(helpWidth))
			}
		}
		c.Print(b.String())
		return nil
	})
}

// helpWidth fits a terminal that nobody made wider.
const helpWidth = 100

// suggestFlags makes every command below c answer a flag that it does not know
// with the one that was most likely meant.
func suggestFlags(c *cobra.Command) *cobra.Command {
	for _, sub := range c.Commands() {
		suggestFlags(sub)
		sub.SetFlagErrorFunc(func(c *cobra.Command, err error) error {
			hint := ""
			var unknown *pflag.NotExistError
			if errors.As(err, &unknown) {
				if near := nearestFlag(c.Flags(), unknown.GetSpecifiedName()); near != "" {
					hint = ", did you mean --" + near + "?"
				}
			}
			return cli.UsageErrorf("%w%s\nSee '%s --help'", err, hint, c.CommandPath())
		})
	}
	return c
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
