package access

import (
	"context"
	"net"
	"sync"
	"testing"

	"github.com/sirupsen/logrus"
	logtest "github.com/sirupsen/logrus/hooks/test"
	"go.uber.org/goleak"

	"github.com/kasway/kasway/pkg/dial"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// conn is a Conn that is only compared.
type conn struct{ net.Conn }

func (*conn) CloseWrite() error { return nil }
func (*conn) Abort(error)       {}

// dialled is the end of a chain: it records what reaches it.
type dialled struct {
	mu    sync.Mutex
	names []string
	conn  conn
	// errs, by name, are answers other than the conn.
	errs map[string]error
}

func (d *dialled) dial(_ context.Context, t dial.Target) (dial.Conn, error) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.names = append(d.names, t.Name)
	if err := d.errs[t.Name]; err != nil {
		return nil, err
	}
	return &d.conn, nil
}

func quiet() (logrus.FieldLogger, *logtest.Hook) {
	log, hook := logtest.NewNullLogger()
	return log, hook
}
