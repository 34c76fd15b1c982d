package main

import (
	"os"
	"time"

	"github.com/schollz/progressbar/v3"
	"golang.org/x/term"

	"palimpsest/internal/audit"
)

// verifyBar shows how much is verified, and how long the rest will take: how many messages of the log where
// all of it is read, and how many sessions otherwise.
type verifyBar struct {
	bar      *progressbar.ProgressBar
	messages bool
}

// begin shows a bar when somebody looks at standard error.
func (b *verifyBar) begin(sessions int, messages uint64) {
	if sessions < 2 || !term.IsTerminal(int(os.Stderr.Fd())) {
		return
	}
	total, its := int64(sessions), "sessions"
	if b.messages = messages > 0; b.messages {
		total, its = int64(messages), "commits"
	}
	b.bar = progressbar.NewOptions64(total,
		progressbar.OptionSetWriter(os.Stderr), progressbar.OptionSetDescription("verifying"),
		progressbar.OptionShowCount(), progressbar.OptionShowIts(), progressbar.OptionSetItsString(its),
		progressbar.OptionSetPredictTime(true),
		progressbar.OptionThrottle(100*time.Millisecond), progressbar.OptionClearOnFinish())
}

func (b *verifyBar) read(messages int) {
	if b.bar != nil && b.messages {
		_ = b.bar.Add(messages) // a terminal that is gone is no reason to stop
	}
}

func (b *verifyBar) each(*audit.SessionReport) {
	if b.bar != nil && !b.messages {
		_ = b.bar.Add(1)
	}
}

func (b *verifyBar) end() {
	if b.bar != nil {
		_ = b.bar.Clear()
	}
}
