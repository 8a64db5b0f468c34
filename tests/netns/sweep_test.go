package netns

import (
	"sync"
	"testing"
)

// Labs that others open at the same time are swept by nobody.
func TestOpenBesideSweeps(t *testing.T) {
	Require(t)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				if err := Sweep(); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for range 100 {
		lab, err := Open()
		if err != nil {
			t.Error(err)
			continue
		}
		if err := lab.Close(); err != nil {
			t.Error(err)
		}
	}
	close(stop)
	wg.Wait()
}
