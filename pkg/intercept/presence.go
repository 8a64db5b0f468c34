package intercept

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"strings"
)

// presencePrefix begins the names of the abstract UNIX sockets by which agents
// are known. Such a name belongs to the network namespace, as all that agents
// install does, and is gone with the process that has it.
const presencePrefix = "@kasway-agent-"

// Announce makes this agent known to Present until it is closed, in the calling
// thread's network namespace. Nobody is served on the socket.
func Announce(generation string) (io.Closer, error) {
	l, err := net.Listen("unix", presencePrefix+generation)
	if err != nil {
		return nil, fmt.Errorf("announcing this agent: %w", err)
	}
	return l, nil
}

// Present lists the generations of the agents that live in the calling thread's
// network namespace, whatever their configuration.
func Present() ([]string, error) {
	f, err := os.Open("/proc/thread-self/net/unix")
	if err != nil {
		return nil, fmt.Errorf("looking for agents: %w", err)
	}
	defer f.Close()
	var generations []string
	lines := bufio.NewScanner(f)
	for lines.Scan() {
		_, name, found := strings.Cut(lines.Text(), " "+presencePrefix)
		if found {
			generations = append(generations, name)
		}
	}
	if err := lines.Err(); err != nil {
		return nil, fmt.Errorf("looking for agents: %w", err)
	}
	return generations, nil
}
