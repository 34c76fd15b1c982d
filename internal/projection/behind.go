package projection

import "time"

// much is how many messages make the difference between following the log and catching up with it.
const much = 1000

// farBehind is how many messages are so many that nobody waits for the next: each head that is written
// before they are read is written again behind them, and with thousands of sessions in turns that
// takes more time than reading.
const farBehind, farTimes = 64 * much, 10

// flushAfter is how long a folded event waits to be in a head.
func (p *partition) flushAfter() time.Duration {
	switch {
	case p.pending > farBehind:
		return farTimes * p.w.cfg.FlushBehind
	case p.pending > much:
		return p.w.cfg.FlushBehind
	}
	return p.w.cfg.FlushAfter
}

// caughtUp reports that everything is in heads now, and much of it is behind the checkpoint: who
// waits for the projection to be done, and who would begin where this worker ends, need not wait
// for the next one.
func (p *partition) caughtUp(now time.Time) bool {
	return len(p.dirty) == 0 && len(p.lost) == 0 && p.read.Load() > p.checkpoint+much &&
		p.nextCheck.Sub(now) <= p.w.cfg.CheckpointEvery*4/5
}
