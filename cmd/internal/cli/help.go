package cli

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

// FlagGroup is a headed part of a command's help.
type FlagGroup struct {
	Title string
	Flags []string
}

// GroupFlags makes c's help show its flags in groups, in the given order; a
// flag of no group is shown at the end, so that none is ever hidden.
func GroupFlags(c *cobra.Command, groups ...FlagGroup) {
	c.Flags().SortFlags = false
	c.SetUsageFunc(func(c *cobra.Command) error {
		var b strings.Builder
		b.WriteString("Usage:\n  " + c.UseLine() + "\n")
		if c.HasExample() {
			b.WriteString("\nExamples:\n" + c.Example + "\n")
		}
		rest := FlagGroup{Title: "Other"}
		c.LocalFlags().VisitAll(func(f *pflag.Flag) {
			if f.Name != "help" && !slices.ContainsFunc(groups, func(g FlagGroup) bool { return slices.Contains(g.Flags, f.Name) }) {
				rest.Flags = append(rest.Flags, f.Name)
			}
		})
		for _, g := range append(slices.Clone(groups), rest) {
			set := pflag.NewFlagSet(g.Title, pflag.ContinueOnError)
			set.SortFlags = false
			for _, name := range g.Flags {
				if f := c.Flags().Lookup(name); f != nil {
					set.AddFlag(f)
				}
			}
			if set.HasAvailableFlags() {
				b.WriteString("\n" + g.Title + ":\n" + set.FlagUsagesWrapped(helpWidth))
			}
		}
		c.Print(b.String())
		return nil
	})
}

// helpWidth fits a terminal that nobody made wider.
const helpWidth = 100
