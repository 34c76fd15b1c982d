package main

import (
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"palimpsest/internal/audit"
)

// verifyBar shows how many sessions are verified, and how long the others will take. A nil bar
// shows nothing.
type verifyBar struct{ bar *progressbar.ProgressBar }

// begin shows a bar when somebody looks at standard error.
func (b *verifyBar) begin(sessions int) {
	if sessions < 2 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return
	}
	b.bar = progressbar.NewOptions(sessions,
		progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("verifying"),
		progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString("sessions"),
		progressbar.OptionSetPredictTime(true),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
}

func (b *verifyBar) each(*audit.SessionReport) {
	if b.bar != nil {
		_ = b.bar.Add(1) // a terminal that is gone is no reason to stop
	}
}

func (b *verifyBar) end() {
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}
