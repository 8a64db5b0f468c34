package rules

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// Kernel names of mode iptables. Everything that is Kasway's begins with one
// of the prefixes, so that it can be found and removed without a config.
const (
	// IPTablesPrefix begins the name of every chain.
	IPTablesPrefix = "KASWAY-"
	// IPTablesGuard is the chain that outlives the agent.
	IPTablesGuard = "KASWAY-GUARD"
	// IPSet4Prefix and IPSet6Prefix begin the names of the sets; a generation
	// follows.
	IPSet4Prefix = "kasway4-"
	IPSet6Prefix = "kasway6-"
)

// IPTables is everything that mode iptables installs for one State. The mode
// installs from this value and String prints it: they cannot differ.
type IPTables struct {
	Sets     []IPSet
	Families []IPTablesFamily
}

// IPSet is a set that says "the agent lives": it holds every address of its
// family, and empties itself when it is not renewed.
type IPSet struct {
	Name string
	V6   bool
	// Timeout of the set and of each element, in whole seconds (ipset knows no
	// finer ones).
	Timeout  uint32
	Elements []netip.Prefix
}

// IPTablesFamily is the input of one iptables-restore or ip6tables-restore.
type IPTablesFamily struct {
	V6 bool
	// Tables in the order in which they are committed. Each commit is atomic.
	Tables []IPTable
}

// IPTable is our part of one table.
type IPTable struct {
	Name   string
	Chains []IPChain
	// Jumps lead from built-in chains to ours; each goes to the first place.
	Jumps []IPRule
}

// IPChain is one chain of ours with all its rules.
type IPChain struct {
	Name, Comment string
	Rules         [][]string
}

// IPRule is a rule in a chain: its arguments after -A or -I.
type IPRule struct {
	Chain string
	Args  []string
}

// Target is the chain or verdict that the rule jumps to; "" if it has none.
func (r IPRule) Target() string {
	if i := slices.Index(r.Args, "-j"); i >= 0 && i+1 < len(r.Args) {
		return r.Args[i+1]
	}
	return ""
}

// Restore is the text for iptables-restore --noflush. The rules in drop, which
// are jumps found in place, are deleted in the commit that inserts the new
// ones, so that there is no moment without a jump. drop is by table.
func (f IPTablesFamily) Restore(drop map[string][]IPRule) string {
	var b strings.Builder
	for _, t := range f.Tables {
		fmt.Fprintf(&b, "*%s\n", t.Name)
		for _, c := range t.Chains {
			fmt.Fprintf(&b, ":%s - [0:0]\n", c.Name)
		}
		for _, c := range t.Chains {
			fmt.Fprintf(&b, "# %s\n", c.Comment)
			for _, r := range c.Rules {
				fmt.Fprintf(&b, "-A %s %s\n", c.Name, strings.Join(r, " "))
			}
		}
		for _, r := range drop[t.Name] {
			fmt.Fprintf(&b, "-D %s %s\n", r.Chain, strings.Join(r.Args, " "))
		}
		for _, r := range t.Jumps {
			fmt.Fprintf(&b, "-I %s 1 %s\n", r.Chain, strings.Join(r.Args, " "))
		}
		b.WriteString("COMMIT\n")
	}
	return b.String()
}

// String is exactly what is installed where nothing of Kasway's was before, in
// the notations of ipset restore and iptables-restore.
func (t IPTables) String() string {
	var b strings.Builder
	if len(t.Sets) > 0 {
		b.WriteString("# ipset restore: the agent renews these elements twice a second; rules that match the sets end with it.\n")
	}
	for _, s := range t.Sets {
		fmt.Fprintf(&b, "create %s hash:net family %s timeout %d\n", s.Name, map[bool]string{false: "inet", true: "inet6"}[s.V6], s.Timeout)
		for _, e := range s.Elements {
			fmt.Fprintf(&b, "add %s %s timeout %d\n", s.Name, e, s.Timeout)
		}
	}
	for _, f := range t.Families {
		fmt.Fprintf(&b, "\n# %s-restore --noflush\n%s", map[bool]string{false: "iptables", true: "ip6tables"}[f.V6], f.Restore(nil))
	}
	return b.String()
}
