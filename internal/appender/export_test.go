package appender

// Waiting is how many appends wait for a session, beside those that are in an actor's hands.
func (a *Appender) Waiting(session string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.sessions[session]; s != nil {
		return len(s.queue)
	}
	return 0
}

// Keys is how many idempotency keys of a session at rest are in memory.
func (a *Appender) Keys(session string) int {
	a.mu.Lock()
	defer a.mu.Unlock()
	if s := a.sessions[session]; s != nil && s.keys != nil {
		return len(s.keys.oldest)
	}
	return 0
}
