package main

import (
	"context"
	"fmt"
	"io"
	"net/netip"
	"slices"

	"github.com/sirupsen/logrus"
	"github.com/spf13/cobra"

	"github.com/kasway/kasway/cmd/internal/cli"
	"github.com/kasway/kasway/pkg/agent"
	"github.com/kasway/kasway/pkg/config"
	"github.com/kasway/kasway/pkg/intercept"
	"github.com/kasway/kasway/pkg/rules"
)

func rulesCommand() *cobra.Command {
	var running bool
	c := &cobra.Command{
		Use:   "rules",
		Short: "Print exactly what would be installed, and change nothing",
		Long: `Prints what an agent of this configuration would install, in the notation of the
mode's own tool. With --running it prints what the agent on this node has
installed, with the ports and the generation that it has.`,
		Example: `  kasway-agent rules -f examples/agent.yaml --mode nft
  kasway-agent rules -f examples/agent.yaml --mode iptables
  kasway-agent rules --running`,
		Args: cli.NoArgs,
	}
	c.Flags().BoolVar(&running, "running", false, "what the running agent has installed (see --admin-socket)")
	flags := configFlags(c, "running")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if running {
			s, err := ask(c.Context(), socketOf(c, flags))
			if err != nil {
				return err
			}
			if s.Mode == "" {
				return fmt.Errorf("the agent has installed nothing yet: %s", s.NotReady)
			}
			return printRules(c.OutOrStdout(), s.Mode, s.State, s.Bind)
		}
		cfg, err := config.LoadAgent(flags)
		if err != nil {
			return err
		}
		return dryRun(c.Context(), cfg, c.OutOrStdout(), c.ErrOrStderr())
	}
	return c
}

// socketOf is the admin socket that the flag or the configuration names. The
// configuration may well be another than the running agent's, or none.
func socketOf(c *cobra.Command, flags *config.AgentOverrides) string {
	if f := c.Flags().Lookup("admin-socket"); f.Changed {
		return f.Value.String()
	}
	if cfg, err := config.LoadAgent(flags); err == nil {
		return cfg.Observe.AdminSocket
	}
	return config.AgentDefaults().Observe.AdminSocket
}

func dryRun(ctx context.Context, cfg config.Agent, stdout, stderr io.Writer) error {
	s, err := agent.DryRun(ctx, cfg, warnings(stderr))
	if err != nil {
		return err
	}
	mode, text := cfg.Intercept.Mode, ""
	if mode == config.ModeAuto {
		mode = modeOrder[0]
		text = fmt.Sprintf("# intercept.mode is auto; this is %s, the first that is tried (--mode shows another).\n", mode)
	}
	if mode == config.ModeListen {
		text += "# Dry run: nothing was changed.\n"
	} else {
		text += fmt.Sprintf("# Dry run: generation %q, the ports from %d on and the node's IPv6 address stand for those of the running agent.\n",
			agent.DryRunGeneration, agent.DryRunPort)
	}
	if _, err := io.WriteString(stdout, text); err != nil {
		return err
	}
	var bind []netip.Addr
	if cfg.Intercept.BindAddress != "" {
		b, err := netip.ParseAddr(cfg.Intercept.BindAddress)
		if err != nil {
			return err
		}
		bind = append(bind, b)
	}
	return printRules(stdout, mode, s, bind)
}

// warnings is a log of what a person should know, in the form of errors.
func warnings(w io.Writer) logrus.FieldLogger {
	log := logrus.New()
	log.SetOutput(w)
	log.SetLevel(logrus.WarnLevel)
	log.SetFormatter(warning{})
	return log
}

type warning struct{}

// Format implements logrus.Formatter.
func (warning) Format(e *logrus.Entry) ([]byte, error) {
	text := fmt.Sprintf("%s: %s: %s", binary, e.Level, e.Message)
	if err, ok := e.Data[logrus.ErrorKey].(error); ok {
		text += ": " + oneLine(err.Error())
	}
	return []byte(text + "\n"), nil
}

// printRules prints s as mode installs it. The self-test's part is that of a
// running agent alone.
func printRules(w io.Writer, mode string, s rules.State, bind []netip.Addr) error {
	var text string
	switch mode {
	case config.ModeEBPF:
		text = rules.RenderBPFText(s)
	case "nft":
		text = rules.RenderNFT(s)
	case "iptables":
		text = rules.RenderIPTables(s).String()
	case config.ModeTPROXY:
		text = rules.RenderTProxyNFT(s)
	case tproxyIPTables:
		text = rules.RenderTProxyIPTables(s)
	case config.ModeListen:
		var guarded []netip.AddrPort
		for _, d := range s.Diverts {
			for _, at := range intercept.Placed(bind, d.Ports) {
				if d.Name != intercept.SelfTestName {
					text += fmt.Sprintf("# listens on %s for %s\n", at, d.Name)
					guarded = append(guarded, at)
				}
			}
		}
		slices.SortFunc(guarded, netip.AddrPort.Compare)
		text += rules.PlanNFTListen(guarded, intercept.Mark, intercept.Mark).String()
	default:
		return fmt.Errorf("mode %q has nothing to print", mode)
	}
	_, err := io.WriteString(w, text)
	return err
}
