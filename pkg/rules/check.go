package rules

import (
	"fmt"
	"strings"
)

// Problem is one thing that is wrong with a list of targets.
type Problem struct {
	// Target is the index of the target, -1 for the list as a whole.
	Target int
	// Address is the index of the target's address, -1 for the target itself.
	Address int
	// Field is the field that must change, as in the file: name, addresses,
	// exact or listen; empty for the list as a whole.
	Field string
	// Text says what was found, and what is allowed.
	Text string
}

// Check reports everything that is wrong with targets taken together, in their
// order; nothing means that they can be diverted. Zero Addresses, which no
// parser returns without an error, are passed over.
func Check(targets []Target) []Problem {
	c := checker{names: map[string]int{}, ports: map[uint16]int{}, targets: targets}
	total := 0
	for _, t := range targets {
		total += len(t.Addresses)
	}
	if n := len(Expand(targets)); n > MaxTargets {
		c.add(-1, -1, "", "%d targets (every exact address is one); at most %d are allowed", n, MaxTargets)
	}
	if total > MaxAddresses {
		c.add(-1, -1, "", "%d addresses; at most %d are allowed for all targets together: write neighbours as a prefix", total, MaxAddresses)
	}
	if len(c.problems) > 0 {
		return c.problems // comparing each with each would be long
	}
	for i := range targets {
		c.name(i, -1, "name", targets[i].Name)
		c.exact(i)
		c.listen(i)
		c.overlaps(i)
	}
	return c.problems
}

// CheckName says whether a target or an upstream may be called name.
func CheckName(name string) error {
	const allowed = "1-253 of a-z 0-9 - . : [ ], beginning with a letter, a digit or ["
	bad := func(r rune) bool { return !strings.ContainsRune("abcdefghijklmnopqrstuvwxyz0123456789-.:[]", r) }
	switch {
	case name == "" || len(name) > 253 || strings.ContainsFunc(name, bad) || strings.ContainsRune("-.:]", rune(name[0])):
		return fmt.Errorf("%q is not a name; allowed: %s", name, allowed)
	case name == SelfTestName:
		return fmt.Errorf("the name %s is the agent's own; choose another", name)
	}
	return nil
}

type checker struct {
	targets  []Target
	names    map[string]int
	ports    map[uint16]int
	problems []Problem
}

func (c *checker) add(target, address int, field, format string, a ...any) {
	c.problems = append(c.problems, Problem{target, address, field, fmt.Sprintf(format, a...)})
}

// name claims a name for target i; field is where it was written.
func (c *checker) name(i, address int, field, name string) {
	if err := CheckName(name); err != nil {
		c.add(i, address, field, "%v", err)
		return
	}
	// An exact target may be called like its only address.
	if first, taken := c.names[name]; taken && first != i {
		c.add(i, address, field, "%q is the name of target %d as well; give each its own", name, first+1)
		return
	}
	c.names[name] = i
}

// exact checks what Expand would make of target i.
func (c *checker) exact(i int) {
	t := &c.targets[i]
	if len(t.Addresses) == 0 && (t.Listen == 0 || t.Exact) {
		c.add(i, -1, "addresses", "missing; name at least one address that clients dial, such as 10.96.0.1:443")
	}
	if !t.Exact {
		return
	}
	if t.Listen != 0 && len(t.Addresses) > 1 {
		c.add(i, -1, "listen", "one local port cannot lead to %d exact addresses; give each its own target", len(t.Addresses))
	}
	for j, a := range t.Addresses {
		switch {
		case a == (Address{}):
		case a.Single():
			c.name(i, j, "addresses", a.String())
		default:
			c.add(i, j, "addresses", "%s is a prefix; a target with exact: true needs single addresses", a)
		}
	}
}

func (c *checker) listen(i int) {
	port := c.targets[i].Listen
	if port == 0 {
		return
	}
	if first, taken := c.ports[port]; taken {
		c.add(i, -1, "listen", "port %d is the one of target %q as well; give each its own", port, c.targets[first].Name)
		return
	}
	c.ports[port] = i
}

// overlaps compares target i's literal addresses with everything before them:
// an address of two targets would mean whichever comes first, and an address
// written twice is a mistake of some kind.
func (c *checker) overlaps(i int) {
	t := &c.targets[i]
	for j, a := range t.Addresses {
		for k := 0; k <= i; k++ {
			earlier := c.targets[k].Addresses
			if k == i {
				earlier = earlier[:j]
			}
			for _, b := range earlier {
				if a == (Address{}) || !overlap(a, b) {
					continue
				}
				if k == i {
					c.add(i, j, "addresses", "%s overlaps %s of the same target; keep one", a, b)
				} else {
					c.add(i, j, "addresses", "%s of target %q overlaps %s of target %q; an address belongs to one target", a, t.Name, b, c.targets[k].Name)
				}
			}
		}
	}
}

func overlap(a, b Address) bool {
	if a.Port != b.Port {
		return false
	}
	if a.Host != "" || b.Host != "" {
		return strings.TrimSuffix(a.Host, ".") == strings.TrimSuffix(b.Host, ".")
	}
	return a.Prefix.Overlaps(b.Prefix)
}
