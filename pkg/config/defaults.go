package config

// AgentDefaults are what an agent has where neither file nor flag says
// otherwise; what has no default is left out.
func AgentDefaults() Agent { return agentDefaults() }
