package api

import "net/http"

// Routes lists the routes of a handler that was made without an Edge, as "METHOD path".
func Routes(h http.Handler) []string {
	var out []string
	for path, methods := range h.(*router).routes {
		for method := range methods {
			out = append(out, method+" "+path)
		}
	}
	return out
}

// Active is how many requests are being worked on.
func (s *Services) Active() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.active
}

// Add takes a record as a read makes one.
func (l *AccessLog) Add(a Access) { l.add(a) }
