package load

import (
	"strings"
	"testing"
)

func TestAnOutputCountsInAllThatWasWritten(t *testing.T) {
	t.Parallel()
	o := NewOutput("panic: ", "full")
	for _, piece := range []string{"pan", "ic: x\n", "full full", " fu", strings.Repeat("line\n", outputLimit), "ll"} {
		if _, err := o.Write([]byte(piece)); err != nil {
			t.Fatal(err)
		}
	}
	if p, f := o.Seen("panic: "), o.Seen("full"); p != 1 || f != 2 {
		t.Errorf("seen %d and %d times, want 1 and 2", p, f)
	}
	if n := len(o.String()); n > 2*outputLimit {
		t.Errorf("%d bytes are kept", n)
	}
}
