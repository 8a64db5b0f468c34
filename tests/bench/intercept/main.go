package main

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// everyMode in the order of the table.
var everyMode = []string{"ebpf", "nft", "iptables", "tproxy"}

// options are what a run can be told.
type options struct {
	modes  []string
	rounds int
	out    string
}

func main() {
	var err error
	switch role := os.Getenv(roleEnv); {
	case role == "":
		err = run()
	case role == "client":
		err = runClient()
	default:
		name, ok := strings.CutPrefix(role, "holder ")
		if !ok {
			err = fmt.Errorf("no such role: %s", role)
			break
		}
		err = runHolder(name, os.Getenv(cgroupEnv))
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-intercept:", err)
		os.Exit(1)
	}
}

// run conducts. It fails if a goal is missed.
func run() error {
	var o options
	modes := flag.String("modes", strings.Join(everyMode, ","), "`modes` to measure, comma separated")
	flag.IntVar(&o.rounds, "rounds", 15, "`rounds` of each measure")
	flag.StringVar(&o.out, "out", "bench/out", "`directory` for the figures as JSON")
	flag.Parse()
	o.modes = strings.Split(*modes, ",")
	for _, m := range o.modes {
		if !slices.Contains(everyMode, m) {
			return fmt.Errorf("-modes: no such mode: %s", m)
		}
	}
	if o.rounds < 1 {
		return errors.New("-rounds: at least 1")
	}
	r, err := measure(o)
	if err != nil {
		return err
	}
	r.print(os.Stdout)
	if err := r.write(filepath.Join(o.out, "intercept.json")); err != nil {
		return err
	}
	return r.verdict()
}
