package observe

import (
	"bytes"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// A reader that stops reading stops nobody, loses what does not fit, and is told
// how much that was.
func TestPatient_BlockedReader(t *testing.T) {
	r, w, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	reg := prometheus.NewRegistry()
	p := NewPatient(w, reg)
	line := strings.Repeat("x", 1023) + "\n"
	const lines = 4096
	begun := time.Now()
	for range lines {
		if n, err := p.Write([]byte(line)); n != len(line) || err != nil {
			t.Fatalf("%d, %v", n, err)
		}
	}
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("it has waited for %s", took)
	}
	begun = time.Now()
	p.Close(50 * time.Millisecond)
	if took := time.Since(begun); took > 5*time.Second {
		t.Errorf("closing has waited for %s", took)
	}
	var got bytes.Buffer
	var reading sync.WaitGroup
	reading.Go(func() { _, _ = got.ReadFrom(r) })
	<-p.done
	_ = w.Close()
	reading.Wait()
	_ = r.Close()
	families, err := reg.Gather()
	if err != nil {
		t.Fatal(err)
	}
	lost := int(families[0].GetMetric()[0].GetCounter().GetValue())
	if lost == 0 || strings.Count(got.String(), line) != lines-lost {
		t.Errorf("%d lines came and %d were lost of %d", strings.Count(got.String(), line), lost, lines)
	}
	if want := fmt.Sprintf("\n%d lines of this log were dropped: nobody read it\n", lost); !strings.HasSuffix(got.String(), want) {
		t.Errorf("its end does not say %q", want)
	}
}

// With a reader nothing is lost, and Close comes after the last line.
func TestPatient_Everything(t *testing.T) {
	var got bytes.Buffer
	p := NewPatient(&got, nil)
	var want strings.Builder
	for i := range 1000 {
		line := fmt.Sprintf("line %d\n", i)
		want.WriteString(line)
		_, _ = p.Write([]byte(line))
	}
	p.Close(10 * time.Second)
	if got.String() != want.String() {
		t.Errorf("%d bytes came of %d", got.Len(), want.Len())
	}
}
