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
