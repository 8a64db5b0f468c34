package main

import (
	"slices"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
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
