package tunnel

import (
	"errors"
	"fmt"
	"net/netip"
	"strings"
	"unicode/utf8"

	"google.golang.org/grpc/metadata"
	"google.golang.org/protobuf/proto"

	"github.com/kasway/kasway/pkg/dial"
	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// encodeOpen makes the OPEN of t. Id and target must fit, since cutting them
// would change what they say; workload and command are for people and are cut.
func encodeOpen(t dial.Target) (string, error) {
	o := &tunnelpb.Open{
		Id:       t.ID,
		Target:   t.Name,
		Workload: truncate(strings.ToValidUTF8(t.Workload, "\uFFFD"), tunnelpb.MaxWorkload),
		Pid:      t.PID,
		Command:  truncate(strings.ToValidUTF8(t.Command, "\uFFFD"), tunnelpb.MaxCommand),
	}
	if t.Client.IsValid() {
		o.Client = t.Client.String()
	}
	if t.Original.IsValid() {
		o.Original = t.Original.String()
	}
	if t.UIDKnown {
		o.Uid = &t.UID
	}
	if _, err := targetOf(o); err != nil {
		return "", err
	}
	b, err := proto.Marshal(o)
	if err != nil {
		return "", fmt.Errorf("encode OPEN of %q: %w", t.ID, err)
	}
	return string(b), nil
}

// openError says what is wrong with an OPEN; kind is a label of a metric. It is
// a denial: nothing was dialled, and trying elsewhere would not help.
type openError struct{ kind, text string }

func (e *openError) Error() string { return "bad OPEN: " + e.text }
func (*openError) Unwrap() error   { return dial.ErrDenied }

// decodeOpen reads the one OPEN of a stream's metadata.
func decodeOpen(md metadata.MD) (dial.Target, error) {
	values := md.Get(tunnelpb.KeyOpen)
	switch {
	case len(values) == 0:
		return dial.Target{}, &openError{"missing", "metadata " + tunnelpb.KeyOpen + " is missing"}
	case len(values) > 1:
		return dial.Target{}, &openError{"repeated", fmt.Sprintf("metadata %s is there %d times", tunnelpb.KeyOpen, len(values))}
	case len(values[0]) > tunnelpb.MaxOpen:
		return dial.Target{}, &openError{"too_large", fmt.Sprintf("%d bytes, at most %d are allowed", len(values[0]), tunnelpb.MaxOpen)}
	}
	var o tunnelpb.Open
	if err := proto.Unmarshal([]byte(values[0]), &o); err != nil {
		return dial.Target{}, &openError{"malformed", err.Error()}
	}
	return targetOf(&o)
}

// targetOf checks every field, on both sides.
func targetOf(o *tunnelpb.Open) (dial.Target, error) {
	t := dial.Target{
		ID: o.GetId(), Name: o.GetTarget(), UID: o.GetUid(), UIDKnown: o.Uid != nil,
		Workload: o.GetWorkload(), PID: o.GetPid(), Command: o.GetCommand(),
	}
	client, errClient := address("client", o.GetClient())
	original, errOriginal := address("original", o.GetOriginal())
	t.Client, t.Original = client, original
	err := errors.Join(
		length("id", o.GetId(), 1, tunnelpb.MaxID),
		length("target", o.GetTarget(), 1, tunnelpb.MaxTarget),
		length("workload", o.GetWorkload(), 0, tunnelpb.MaxWorkload),
		length("command", o.GetCommand(), 0, tunnelpb.MaxCommand),
		errClient, errOriginal,
	)
	if err != nil {
		return dial.Target{}, &openError{"invalid", strings.ReplaceAll(err.Error(), "\n", ", ")}
	}
	return t, nil
}

func length(field, s string, least, most int) error {
	if len(s) < least || len(s) > most {
		return fmt.Errorf("%s has %d bytes, allowed are %d to %d", field, len(s), least, most)
	}
	return nil
}

func address(field, s string) (netip.AddrPort, error) {
	if s == "" {
		return netip.AddrPort{}, nil
	}
	if err := length(field, s, 1, tunnelpb.MaxAddress); err != nil {
		return netip.AddrPort{}, err
	}
	a, err := netip.ParseAddrPort(s)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("%s is no address: %q", field, s)
	}
	return a, nil
}

// truncate cuts valid UTF-8 to at most limit bytes, never within a rune.
func truncate(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	for limit > 0 && !utf8.RuneStart(s[limit]) {
		limit--
	}
	return s[:limit]
}
