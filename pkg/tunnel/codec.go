package tunnel

import (
	"fmt"

	"google.golang.org/grpc/mem"
	"google.golang.org/protobuf/proto"

	"github.com/kasway/kasway/pkg/tunnel/tunnelpb"
)

// codec passes the bytes of Forward through as they are, without a copy, and
// encodes the messages of Control as protobuf. The Go type of a message tells
// which of the two it is.
type codec struct{}

// Name is the content subtype: "application/grpc+kasway".
func (codec) Name() string { return tunnelpb.ContentSubtype }

// Marshal takes over the references of a mem.BufferSlice.
func (codec) Marshal(v any) (mem.BufferSlice, error) {
	switch m := v.(type) {
	case mem.BufferSlice:
		return m, nil
	case proto.Message:
		b, err := proto.Marshal(m)
		if err != nil {
			return nil, fmt.Errorf("encode %T: %w", v, err)
		}
		return mem.BufferSlice{mem.SliceBuffer(b)}, nil
	}
	return nil, fmt.Errorf("cannot encode %T", v)
}

// Unmarshal hands out references of its own; the receiver frees them.
func (codec) Unmarshal(data mem.BufferSlice, v any) error {
	switch m := v.(type) {
	case *mem.BufferSlice:
		data.Ref()
		*m = append((*m)[:0], data...)
		return nil
	case proto.Message:
		if err := proto.Unmarshal(data.Materialize(), m); err != nil {
			return fmt.Errorf("decode %T: %w", v, err)
		}
		return nil
	}
	return fmt.Errorf("cannot decode into %T", v)
}
