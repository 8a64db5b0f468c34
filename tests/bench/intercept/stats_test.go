package main

import "testing"

func TestPairs(t *testing.T) {
	p := pairs{Off: []float64{10, 20, 10}, On: []float64{11, 24, 13}}
	if mid, noise := p.ratio(); mid != 1.2 || noise < 0.0999 || noise > 0.1001 {
		t.Errorf("ratio %v, noise %v; want 1.2 and 0.1", mid, noise)
	}
	if mid, noise := p.delta(); mid != 3 || noise != 1.5 {
		t.Errorf("delta %v, noise %v; want 3 and 1.5", mid, noise)
	}
	if m := median([]float64{4, 1, 3, 2}); m != 2.5 {
		t.Errorf("median %v, want 2.5", m)
	}
}
