package projection

import (
	"context"
	"errors"
	"time"

	"palimpsest/internal/snapshot"
)

// A server that loses its power may lose the last second of an unsynced log, and give the stream
// sequences of what is gone to other messages. Heads and checkpoints then tell of a log that is no
// more, and who reads on behind a checkpoint misses what lies before it. So a partition remembers a
// message that it has read, and looks whether the log still has it when it starts and whenever the
// connection was made anew.
//
// The bucket of snapshots may lose its end, too, and the log and the checkpoint keep theirs: heads are
// older then than the checkpoint says. So a head that was written is remembered in the same way.

// witness is a message that was read.
type witness struct {
	StreamSeq uint64 `json:"streamSeq"`
	ID        string `json:"id"` // commit id
}

// regainAtOnce is how many lost sessions are folded again before others get their turn.
const regainAtOnce = 64

// marks are how many witnesses wait until a checkpoint covers them, at the most.
const marks = 64

// mark remembers the message that was read last, for a checkpoint to come.
func (p *partition) mark() {
	if p.newest.ID == "" || len(p.marks) > 0 && p.marks[len(p.marks)-1].StreamSeq >= p.newest.StreamSeq {
		return
	}
	if len(p.marks) == marks {
		p.marks = p.marks[1:]
	}
	p.marks = append(p.marks, p.newest)
}

// witnessFor returns the newest message that a checkpoint covers and that was remembered.
func (p *partition) witnessFor(upTo uint64) *witness {
	for len(p.marks) > 1 && p.marks[1].StreamSeq <= upTo {
		p.marks = p.marks[1:]
	}
	if len(p.marks) > 0 && p.marks[0].StreamSeq <= upTo {
		w := p.marks[0]
		return &w
	}
	return p.stored
}

// gone reports whether the log lost a message that was read. Nothing remembered is nothing lost.
func (p *partition) gone(ctx context.Context, w *witness) (bool, error) {
	if w == nil || w.ID == "" {
		return false, nil
	}
	id, err := p.w.log.CommitID(ctx, w.StreamSeq)
	return err == nil && id != w.ID, err
}

// look asks whether the log still has what was read last, if the connection was made anew since it
// was: conn is how often it was by now. It reports whether what comes now follows on what was read.
func (p *partition) look(ctx context.Context, conn uint64) (follows bool, err error) {
	if p.back {
		return false, nil
	}
	if conn == p.conn {
		return true, nil
	}
	gone, err := p.gone(ctx, &p.newest)
	if err != nil {
		return false, err
	}
	if gone {
		p.w.cfg.Logger.Error("the log lost its end; comparing all heads of the partition with it", "partition", p.n, "streamSeq", p.newest.StreamSeq, "commit", p.newest.ID)
		p.back = true
		return false, nil
	}
	lost, err := p.b.Snapshots.Lost(ctx, p.head)
	if err != nil {
		return false, err
	}
	if lost {
		p.headsLost()
		return false, nil
	}
	p.conn = conn
	return true, nil
}

// headsLost has all heads compared with the log, since their bucket lost its end.
func (p *partition) headsLost() {
	p.w.cfg.Logger.Error("the bucket of snapshots lost its end; comparing all heads of the partition with the log", "partition", p.n)
	p.back = true
}

// wroteHead remembers the newest head.
func (p *partition) wroteHead(m *snapshot.Mark) {
	if p.head == nil || p.head.Revision < m.Revision {
		p.head = m
	}
}

// goBack has every session of the partition held against the log as it is now, and reads on behind
// where the log ends now.
func (p *partition) goBack(ctx context.Context) error {
	if !p.holds() {
		return errLost
	}
	conn := p.w.log.Reconnects()
	end, err := p.w.log.Info(ctx)
	if err != nil {
		return err
	}
	// Before the sessions are listed: a log that is cut again behind that lacks this message.
	last := witness{StreamSeq: end.State.LastSeq}
	if last.StreamSeq > 0 {
		if last.ID, err = p.w.log.CommitID(ctx, last.StreamSeq); err != nil {
			return err
		}
	}
	ids, err := p.w.log.SessionsOf(ctx, p.n)
	if err != nil {
		return err
	}
	head, err := p.b.Snapshots.End(ctx)
	if err != nil {
		return err
	}
	heads, err := p.b.Snapshots.Sessions(ctx)
	if err != nil {
		return err
	}
	for _, id := range heads {
		if p.w.log.Partition(id) == p.n {
			ids = append(ids, id)
		}
	}
	for _, e := range p.sessions {
		if !e.writing { // what is being written is loaded again once it is
			p.drop(e)
		}
	}
	for _, id := range ids {
		p.lost[id] = lost{first: 1, since: time.Now(), suspect: true}
	}
	// Until all of them are regained, whoever starts must go back too.
	p.marks, p.newest, p.stored, p.head = nil, last, nil, head
	if err := p.storeCheckpoint(ctx, checkpointValue{V: 1, StreamSeq: end.State.LastSeq, Back: true}); err != nil {
		p.takeCheckpoint(ctx)
		return err
	}
	p.read.Store(end.State.LastSeq)
	p.checkpointed.Store(0)
	p.back, p.conn = false, conn
	return nil
}

// hold compares a session's head with the log. A head that tells of a commit that the log does not
// have is made anew; one of a session whose log is empty is removed.
func (p *partition) hold(ctx context.Context, e *entry) error {
	if e.snap == nil {
		return nil
	}
	c, err := p.w.log.Stored(ctx, e.session, e.snap.StreamSeq)
	if err != nil && !isMalformed(err) {
		return err
	}
	if c != nil && c.Chain == e.snap.Chain {
		return nil
	}
	p.w.cfg.Logger.Error("head is ahead of the log; folding the log anew", "session", e.session, "headSeq", int64(e.snap.Last()), "streamSeq", e.snap.StreamSeq)
	if err := p.mend(ctx, e); err != nil {
		return err
	}
	if e.snap != nil {
		return nil
	}
	p.drop(e)
	if err := p.b.Snapshots.Remove(ctx, e.session, e.rev); err != nil && !errors.Is(err, snapshot.ErrMoved) {
		return err
	}
	return errDropped
}
